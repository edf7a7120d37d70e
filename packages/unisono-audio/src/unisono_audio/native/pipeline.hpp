// Recordings to rows of a batch: decode, cut, resample, features, pad, normalise; several at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "codecs.hpp"
#include "kernels.hpp"

namespace unisono {

struct Item {
    std::string path;      // of a file, or
    Bytes bytes;           // of a recording, or
    const float* samples = nullptr;  // decoded already, `count` of them at `rate`
    int64_t count = 0;
    int rate = 0;
    Window window;
};

struct Result {
    enum Kind { kGood = 0, kBad = 1, kNeedsTable = 2, kNeedsFFmpeg = 3 } kind = kGood;
    std::string text;          // why it is bad, or which format
    int rate = 0;              // of the recording
    int64_t start = 0;         // frame of the recording that it begins at
    int64_t length = 0;        // samples, or frames of features, before padding
    std::vector<float> values; // where no buffer is given
};

struct Pipeline {
    Codecs codecs;
    int rate = 0;             // 0: each recording's own
    double duration = 0.0;    // seconds; 0 for all
    bool featured = false;
    FeaturePlan plan;
    bool centred = false, drop_last = false;
    float range = 0.0f;       // features further below a recording's largest are raised to it; 0 for none
    bool pad_minimum = true;
    float pad_value = 0.0f;
    float mean = 0.0f, deviation = 1.0f;
    const Kernels* kernels = nullptr;

    // Make each item's row: `out` is (items, rows, width) and each row padded to `rows`; or, without it, each result's
    // own values, neither padded nor cut.
    std::vector<Result> run(const std::vector<Item>& items, float* out, int64_t rows, int threads) const;

    void add(int from, std::shared_ptr<const ResampleTable> table);  // for recordings of a rate
    int64_t width() const { return featured ? plan.outputs : 1; }

private:
    struct Bench {  // what one thread works on
        Room room;
        std::vector<uint8_t> file;
        std::vector<float> samples, resampled, centred, features;
        std::vector<float> scratch;
    };
    void make(const Item& item, Bench& bench, float* out, int64_t rows, Result& result) const;
    const float* spectral(const float* samples, int64_t count, Bench& bench, float* out, int64_t most,
                          int64_t& frames) const;

    mutable std::mutex mutex_;  // of what follows
    std::map<int, std::shared_ptr<const ResampleTable>> tables_;
    mutable std::vector<std::unique_ptr<Bench>> benches_;
};

}  // namespace unisono
