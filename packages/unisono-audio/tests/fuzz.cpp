// Mutated recordings through the native core, under AddressSanitizer and UBSan: see fuzz.py, which builds and runs this.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "../src/unisono_audio/native/pipeline.hpp"

extern "C" {  // of sanitizer/allocator_interface.h, which not every compiler's package brings
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

std::vector<uint8_t> mutated(std::vector<uint8_t> data, std::mt19937& random) {
    const int edits = 1 + static_cast<int>(random() % 12);
    for (int i = 0; i < edits && !data.empty(); i++) {
        // Headers decide most, so half of the edits are there.
        const size_t reach = random() % 2 ? std::min<size_t>(data.size(), 200u << (random() % 5)) : data.size();
        const size_t at = random() % reach;
        switch (random() % 9) {
            case 8: {  // a field of a header: 0, -1, huge, or what another one has
                const size_t size = random() % 2 ? 4 : 2, to = random() % data.size();
                if (at + size > data.size() || to + size > data.size()) break;
                static const uint8_t values[][4] = {
                    {0, 0, 0, 0}, {255, 255, 255, 255}, {255, 255, 255, 127}, {0, 0, 0, 128}, {1, 0, 0, 0}};
                const uint8_t* from = random() % 2 ? values[random() % 5] : data.data() + to;
                for (size_t k = 0; k < size; k++) data[at + k] = from[k];
                break;
            }
            case 0: data[at] ^= static_cast<uint8_t>(1u << (random() % 8)); break;
            case 1: data[at] = static_cast<uint8_t>(random()); break;
            case 2: data[at] = random() % 2 ? 0xff : 0x00; break;
            case 3:
                for (size_t k = at; k < std::min(data.size(), at + 4); k++) data[k] = static_cast<uint8_t>(random());
                break;
            case 4:
                if (random() % 4 == 0) data.resize(at);
                break;
            case 5: {  // a stretch again, elsewhere
                const size_t length = std::min<size_t>(random() % 64, data.size() - at), to = random() % data.size();
                std::vector<uint8_t> part(data.begin() + static_cast<long>(at), data.begin() + static_cast<long>(at + length));
                data.insert(data.begin() + static_cast<long>(to), part.begin(), part.end());
                break;
            }
            case 6: {  // a stretch less
                const size_t length = std::min<size_t>(random() % 64, data.size() - at);
                data.erase(data.begin() + static_cast<long>(at), data.begin() + static_cast<long>(at + length));
                break;
            }
            default:
                for (size_t k = at; k < std::min(data.size(), at + random() % 16); k++) data[k] = 0x7f;
        }
    }
    return data;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 6) return std::fprintf(stderr, "fuzz CODECS.so LIBSNDFILE.so COUNT SEED FILE...\n"), 2;
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

    const int count = std::atoi(argv[3]);
    const auto seed = static_cast<unsigned>(std::atoi(argv[4]));
    std::vector<std::vector<uint8_t>> base;
    for (int i = 5; i < argc; i++) {
        std::ifstream file(argv[i], std::ios::binary);
        base.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::vector<float> out(64 * 4);
    __sanitizer_install_malloc_and_free_hooks(allocated, freed);
    int good = 0, bad = 0;
    for (int i = 0; i < count; i++) {
        std::mt19937 random(seed + static_cast<unsigned>(i));
        std::vector<uint8_t> data = mutated(base[random() % base.size()], random);
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
            std::fprintf(stderr, "seed %u: %zu bytes in use\n", seed + static_cast<unsigned>(i), most - before);
            return 1;
        }
        if (results[0].kind == unisono::Result::kGood) good++;
        else if (results[0].kind == unisono::Result::kBad) bad++;
    }
    std::printf("%d mutated: %d decoded, %d refused\n", count, good, bad);
    return good > 0 && good < count ? 0 : 1;  // else it did not look at both
}
