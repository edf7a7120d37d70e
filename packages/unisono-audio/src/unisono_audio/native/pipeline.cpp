#include "pipeline.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>

namespace unisono {
namespace {

constexpr int64_t kMapped = int64_t{4} << 20;  // bytes from which on a file is mapped, so that windows read little

// The content of a file, for as long as this lives.
struct File {
    Bytes bytes;
    void* map = nullptr;

    File(const std::string& path, std::vector<uint8_t>& room) {
        const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (descriptor < 0) throw BadRecording(std::string("cannot be opened: ") + std::strerror(errno));
        struct stat about;
        if (fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode)) {
            ::close(descriptor);
            throw BadRecording("cannot be opened: it is not a file");
        }
        int64_t size = about.st_size;
        if (size >= kMapped) {
            map = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE, descriptor, 0);
            ::close(descriptor);
            if (map == MAP_FAILED) {
                map = nullptr;
                throw BadRecording(std::string("cannot be read: ") + std::strerror(errno));
            }
            bytes = {static_cast<const uint8_t*>(map), size};
            return;
        }
        if (static_cast<int64_t>(room.size()) < size) room.resize(static_cast<size_t>(size));
        int64_t done = 0;
        while (done < size) {
            const ssize_t got = ::read(descriptor, room.data() + done, static_cast<size_t>(size - done));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) {
                const std::string why = std::strerror(errno);
                ::close(descriptor);
                throw BadRecording("cannot be read: " + why);
            }
            if (got == 0) size = done;  // it has become shorter
            done += got;
        }
        ::close(descriptor);
        bytes = {room.data(), size};
    }
    ~File() {
        if (map != nullptr) munmap(map, static_cast<size_t>(bytes.size));
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
};

struct NeedsTable {
    int rate;
};

float* aligned(std::vector<float>& room, int64_t floats) {
    if (static_cast<int64_t>(room.size()) < floats + 16) room.resize(static_cast<size_t>(floats + 16));
    const auto at = reinterpret_cast<uintptr_t>(room.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t{63});
}

void room_for(std::vector<float>& room, int64_t floats) {
    if (static_cast<int64_t>(room.size()) < floats) room.resize(static_cast<size_t>(floats));
}

}  // namespace

void Pipeline::add(int from, std::shared_ptr<const ResampleTable> table) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tables_[from] = std::move(table);
}

// Features of samples, at most `most` frames; into `out`, or where that is null, into the bench.
const float* Pipeline::spectral(const float* samples, int64_t count, Bench& bench, float* out, int64_t most,
                                int64_t& frames) const {
    if (centred) {  // the signal is mirrored at its ends, so that frame i is around sample i * hop
        const int64_t side = plan.size / 2, inner = std::max(count, side + 1);
        room_for(bench.centred, inner + 2 * side);
        float* to = bench.centred.data();
        std::copy(samples, samples + count, to + side);
        std::fill(to + side + count, to + side + inner, 0.0f);
        for (int64_t i = 0; i < side; i++) {
            to[side - 1 - i] = to[side + 1 + i];
            to[side + inner + i] = to[side + inner - 2 - i];
        }
        samples = to + (plan.size - plan.window) / 2;  // a window shorter than the FFT stands in its middle
        frames = std::max<int64_t>(1, inner / plan.hop + (drop_last ? 0 : 1));
    } else {
        if (count < plan.window) {
            room_for(bench.centred, plan.window);
            std::copy(samples, samples + count, bench.centred.data());
            std::fill(bench.centred.begin() + count, bench.centred.begin() + plan.window, 0.0f);
            samples = bench.centred.data();
            count = plan.window;
        }
        frames = 1 + (count - plan.window) / plan.hop;
    }
    if (most >= 0) frames = std::min(frames, most);
    if (out == nullptr) {
        room_for(bench.features, frames * plan.outputs);
        out = bench.features.data();
    }
    kernels->features(plan, samples, frames, out, aligned(bench.scratch, kernels->scratch(plan)));
    return out;
}

void Pipeline::make(const Item& item, Bench& bench, float* out, int64_t rows, Result& result) const {
    const float* samples = item.samples;
    int64_t count = item.count;
    int from = item.rate;
    std::shared_ptr<const ResampleTable> table;
    auto table_of = [&](int other) -> int64_t {
        if (rate == 0 || other == rate) return 0;
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = tables_.find(other);
        if (found == tables_.end()) throw NeedsTable{other};
        table = found->second;
        return table->left;
    };
    if (samples == nullptr) {
        std::unique_ptr<File> file;
        Bytes bytes = item.bytes;
        if (!item.path.empty()) {
            file = std::make_unique<File>(item.path, bench.file);
            bytes = file->bytes;
        }
        const Decoded decoded = decode(
            codecs, bytes, item.window, bench.room, bench.samples,
            [](int other, void* context) { return (*static_cast<decltype(table_of)*>(context))(other); }, &table_of);
        from = decoded.rate;
        result.start = decoded.start;
        count = decoded.count;
        const int64_t left = table ? table->left : 0;
        if (table) {
            room_for(bench.samples, left + count + table->right);
            std::fill(bench.samples.begin() + left + count, bench.samples.begin() + left + count + table->right, 0.0f);
        }
        samples = bench.samples.data() + left;
    } else {
        const int64_t left = table_of(from);
        if (table) {
            room_for(bench.samples, left + count + table->right);
            std::fill(bench.samples.begin(), bench.samples.begin() + left, 0.0f);
            std::copy(samples, samples + count, bench.samples.begin() + left);
            std::fill(bench.samples.begin() + left + count, bench.samples.begin() + left + count + table->right, 0.0f);
            samples = bench.samples.data() + left;
        }
    }
    result.rate = from;
    if (table) {
        const int64_t divisor = std::gcd(from, rate);
        const int64_t to_part = rate / divisor, from_part = from / divisor;
        const int64_t outputs = (count * to_part + from_part - 1) / from_part;
        room_for(bench.resampled, outputs);
        kernels->resample(*table, samples, bench.resampled.data(), outputs);
        samples = bench.resampled.data();
        count = outputs;
    }
    if (duration > 0 && rate > 0) count = std::min(count, static_cast<int64_t>(std::floor(duration * rate + 0.5)));
    if (!featured) {
        result.length = out != nullptr ? std::min(count, rows) : count;
        if (out == nullptr) {
            result.values.assign(samples, samples + count);
            return;
        }
        std::copy(samples, samples + result.length, out);
        std::fill(out + result.length, out + rows, 0.0f);
        return;
    }
    int64_t frames = 0;
    const float* made = spectral(samples, count, bench, out, out != nullptr ? rows : -1, frames);
    const int64_t size = frames * plan.outputs;
    float* values = out;
    if (out == nullptr) {
        result.values.assign(made, made + size);
        values = result.values.data();
    }
    if (range > 0) {
        const float least = *std::max_element(values, values + size) - range;
        for (int64_t i = 0; i < size; i++) values[i] = values[i] < least ? least : values[i];
    }
    float pad = pad_value;
    if (out != nullptr && pad_minimum && frames < rows) {
        pad = values[0];
        for (int64_t i = 1; i < size; i++) pad = values[i] < pad ? values[i] : pad;
    }
    if (mean != 0.0f || deviation != 1.0f)
        for (int64_t i = 0; i < size; i++) values[i] = (values[i] - mean) / deviation;
    if (out != nullptr) std::fill(out + size, out + rows * plan.outputs, (pad - mean) / deviation);
    result.length = frames;
}

std::vector<Result> Pipeline::run(const std::vector<Item>& items, float* out, int64_t rows, int threads) const {
    std::vector<Result> results(items.size());
    std::atomic<size_t> next{0};
    auto work = [&] {
        std::unique_ptr<Bench> bench;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!benches_.empty()) {
                bench = std::move(benches_.back());
                benches_.pop_back();
            }
        }
        if (!bench) bench = std::make_unique<Bench>();
        bench->room.kernels = kernels;
        for (size_t i; (i = next.fetch_add(1)) < items.size();) {
            float* row = out == nullptr ? nullptr : out + static_cast<int64_t>(i) * rows * width();
            Result& result = results[i];
            try {
                make(items[i], *bench, row, rows, result);
            } catch (const BadRecording& error) {
                result.kind = Result::kBad;
                result.text = error.what();
            } catch (const NeedsFFmpeg& error) {
                result.kind = Result::kNeedsFFmpeg;
                result.text = error.what();
            } catch (const NeedsTable& need) {
                result.kind = Result::kNeedsTable;
                result.rate = need.rate;
            } catch (const std::bad_alloc&) {
                result.kind = Result::kBad;
                result.text = "cannot be decoded: out of memory";
            } catch (const std::exception& error) {  // nothing may leave a thread
                result.kind = Result::kBad;
                result.text = std::string("cannot be decoded: ") + error.what();
            }
            if (result.kind != Result::kGood && row != nullptr) std::fill(row, row + rows * width(), 0.0f);
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        benches_.push_back(std::move(bench));
    };
    const int helpers = std::min<int>(threads, static_cast<int>(items.size())) - 1;
    std::vector<std::thread> pool;
    try {
        for (int i = 0; i < helpers; i++) pool.emplace_back(work);
    } catch (const std::system_error&) {  // the system gives no more threads: those that there are do the work
    }
    work();
    for (auto& thread : pool) thread.join();
    return results;
}

}  // namespace unisono
