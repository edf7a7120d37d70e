// Mutated recordings through the native core, under AddressSanitizer and UBSan: see fuzz.py, which builds and runs this.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "../src/unisono_audio/native/pipeline.hpp"

extern "C" {  // of sanitizer/allocator_interface.h, which not every compiler's package brings
void __sanitizer_set_death_callback(void (*)());
int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t), void (*)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void*);
}

namespace {

constexpr size_t kBound = size_t{96} << 20;  // bytes in use at any time: codec state, a window and its features
std::atomic<size_t> in_use{0}, most{0};

void allocated(const volatile void*, size_t size) {
    const size_t now = in_use += size;
    if (now > most) most = now;
}
void freed(const volatile void* at) { in_use -= __sanitizer_get_allocated_size(at); }

void* symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) std::fprintf(stderr, "no %s\n", name), std::exit(2);
    return found;
}

long current = 0;  // number of the mutation, which makes it again

void say_which() { std::fprintf(stderr, "mutation %ld\n", current); }
void hangs(int) { say_which(), std::fprintf(stderr, "it hangs\n"), _exit(1); }

// The next recording of standard input, behind its length; false at the end.
bool next_recording(std::vector<uint8_t>& data) {
    uint32_t size = 0;
    if (std::fread(&size, sizeof size, 1, stdin) != 1) return false;
    data.resize(size);
    return size == 0 || std::fread(data.data(), size, 1, stdin) == 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return std::fprintf(stderr, "fuzz CODECS.so LIBSNDFILE.so FIRST < RECORDINGS\n"), 2;
    void *mini = dlopen(argv[1], RTLD_NOW), *snd = dlopen(argv[2], RTLD_NOW);
    if (mini == nullptr || snd == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
    unisono::Pipeline pipeline;
    pipeline.codecs.flac_open = symbol(mini, "ma_dr_flac_open_memory");
    pipeline.codecs.flac_read = symbol(mini, "ma_dr_flac_read_pcm_frames_f32");
    pipeline.codecs.flac_seek = symbol(mini, "ma_dr_flac_seek_to_pcm_frame");
    pipeline.codecs.flac_close = symbol(mini, "ma_dr_flac_close");
    pipeline.codecs.snd_open = symbol(snd, "sf_open_virtual");
    pipeline.codecs.snd_read = symbol(snd, "sf_readf_float");
    pipeline.codecs.snd_seek = symbol(snd, "sf_seek");
    pipeline.codecs.snd_close = symbol(snd, "sf_close");
    pipeline.codecs.snd_error = symbol(snd, "sf_strerror");
    pipeline.duration = 0.5;
    pipeline.featured = true;
    pipeline.kernels = &unisono::kernels();
    auto& plan = pipeline.plan;
    plan.window = 400, plan.hop = 160, plan.size = 512, plan.bands = plan.outputs = 4, plan.floor = 1e-7f, plan.scale = 1;
    plan.shape.assign(400, 0.5f);
    plan.band_first.assign(4, 3), plan.band_count.assign(4, 9), plan.band_values.assign(36, 0.1f);
    if (!unisono::plan_fft(plan)) return 2;

    std::vector<float> out(64 * 4);
    __sanitizer_install_malloc_and_free_hooks(allocated, freed);
    __sanitizer_set_death_callback(say_which);
    std::signal(SIGALRM, hangs);
    int good = 0, bad = 0, left = 0;
    std::vector<uint8_t> data;
    for (current = std::atol(argv[3]); next_recording(data); current++) {
        std::mt19937 random(static_cast<unsigned>(current));
        std::vector<unisono::Item> items(1);
        const std::vector<uint8_t> exact(data);  // no spare room at its end, so that a read beyond it is seen
        items[0].bytes = {exact.data(), static_cast<int64_t>(exact.size())};
        switch (random() % 3) {
            case 0: break;
            case 1: items[0].window.start = -1, items[0].window.place = 0.7; break;
            default: items[0].window.start = static_cast<double>(random() % 100) / 250;
        }
        items[0].window.duration = random() % 4 ? 0.5 : 0.01;
        most = in_use.load();
        alarm(20);  // none hangs
        const size_t before = in_use;
        const auto results = pipeline.run(items, out.data(), 64, 1);
        alarm(0);
        if (most - before > kBound) {
            say_which();
            std::fprintf(stderr, "%zu bytes in use\n", most - before);
            return 1;
        }
        (results[0].kind == unisono::Result::kGood ? good : results[0].kind == unisono::Result::kBad ? bad : left)++;
    }
    std::printf("%d %d %d\n", good, bad, left);
    return 0;
}
