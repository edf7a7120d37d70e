// The arithmetic: resampling and spectral features, compiled once for each instruction set.
//
// Every sum is made in one order that no instruction set changes: vectors hold independent outputs or independent
// frames, never parts of one sum, and nothing is fused (-ffp-contract=off). So the bits are the same on every CPU.
#pragma once

#include <cstdint>
#include <vector>

namespace unisono {

// A polyphase resampler: output p of a period is a sum over a stretch of input. Outputs stand in blocks of eight that
// share a stretch; coefficients lie as [block][tap][output of the block].
struct ResampleTable {
    static constexpr int kBlock = 8;
    int64_t from = 1;              // input samples of a period
    int64_t to = 1;                // outputs of a period, a multiple of kBlock
    int64_t left = 0;              // samples that the first output looks back
    int64_t right = 0;             // zeros that have to follow the input
    std::vector<int32_t> first;    // (blocks,) first input sample of a block, from `left` before its period
    std::vector<int32_t> taps;     // (blocks,)
    std::vector<int64_t> offset;   // (blocks,) where its coefficients begin
    std::vector<float> values;
};

// A complex FFT of n = 2^a 3^b 5^c points, in place: outputs lie in another order.
struct FftPlan {
    int n = 0;
    std::vector<int32_t> radices;
    std::vector<float> twiddles;  // (re, im) of each stage, one after the other
    std::vector<int32_t> place;   // (n,) where an output lies
    bool make(int points);        // false for a number that has other factors
};

// The inverse MDCT, as a DCT-IV of `size` numbers by an FFT of half as many.
struct MdctPlan {
    int size = 0;
    FftPlan fft;
    std::vector<float> turns;  // (size/2, 2) exp(-i pi (8 k + 1) / (8 size))
    bool make(int numbers);
};

// Frames -> window -> FFT -> filter bank -> logarithm (-> cosine transform).
struct FeaturePlan {
    int window = 0, hop = 0, size = 0;  // samples of a frame, between frames, of the FFT
    int lead = 0;                       // zeros before the window in the FFT
    bool remove_mean = false;
    float emphasis = 0.0f;
    bool power = true;                  // |X|^2, else |X|
    int bands = 0, outputs = 0;         // of the filter bank; of a frame (bands, or coefficients)
    float floor = 0.0f;                 // least energy that a logarithm is taken of
    float scale = 0.0f;                 // of the natural logarithm; 0 for none
    std::vector<float> shape;           // (window,)
    std::vector<int32_t> band_first, band_count;  // (bands,)
    std::vector<float> band_values;     // weights of all bands, one after the other
    std::vector<float> cosines;         // (outputs, bands), or empty
    FftPlan fft;                        // of size/2 points
    std::vector<int32_t> order;         // 1..size/4 as their outputs lie, which meets no cache set too often
    std::vector<float> unpack;          // (size/4 + 1, 2) exp(-2 pi i k / size)
};

// Complete a plan: everything that follows from `size`. False if the size cannot be transformed.
bool plan_fft(FeaturePlan& plan);

struct Kernels {
    const char* name;
    // `x` is preceded by table.left zeros and followed by table.right; y has `count` samples.
    void (*resample)(const ResampleTable& table, const float* x, float* y, int64_t count);
    // `frames` frames of x, which holds them whole; out is (frames, outputs).
    void (*features)(const FeaturePlan& plan, const float* x, int64_t frames, float* out, float* scratch);
    // DCT-IV of `count` rows of plan.size numbers, each in place.
    void (*mdct)(const MdctPlan& plan, float* const* rows, int count, float* scratch);
    int64_t (*scratch)(const FeaturePlan& plan);  // floats that `features` needs, aligned to 64 bytes
    int lanes;                                    // rows that `mdct` makes together; it needs 2 * size * lanes floats
};

const Kernels& kernels();                          // the best that this CPU has
std::vector<const Kernels*> all_kernels();         // those that it has, the best first

}  // namespace unisono
