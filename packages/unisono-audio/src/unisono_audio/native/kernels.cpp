// Compiled once for each instruction set, with UNISONO_ISA its name and UNISONO_LANES the floats of a vector.
#include "kernels.hpp"

#include <cmath>
#include <cstring>
#include <utility>

#ifndef UNISONO_ISA
#define UNISONO_ISA baseline
#define UNISONO_LANES 4
#endif
#define UNISONO_NAME_(isa) #isa
#define UNISONO_NAME(isa) UNISONO_NAME_(isa)

namespace unisono {
namespace UNISONO_ISA {
namespace {

constexpr int kLanes = UNISONO_LANES;
typedef float Vec __attribute__((vector_size(4 * UNISONO_LANES)));
typedef float Unaligned __attribute__((vector_size(4 * UNISONO_LANES), aligned(4)));
typedef int32_t Int __attribute__((vector_size(4 * UNISONO_LANES)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec8u __attribute__((vector_size(32), aligned(4)));

struct Complex {
    Vec re, im;
    Complex() = default;
    Complex(Vec real, Vec imaginary) : re(real), im(imaginary) {}
    // By parts: GCC copies the whole in halves of vectors, through memory, which stalls what reads it next.
    Complex(const Complex& other) : re(other.re), im(other.im) {}
    Complex& operator=(const Complex& other) {
        re = other.re;
        im = other.im;
        return *this;
    }
};
inline Complex operator+(const Complex& a, const Complex& b) { return {a.re + b.re, a.im + b.im}; }
inline Complex operator-(const Complex& a, const Complex& b) { return {a.re - b.re, a.im - b.im}; }
inline Complex operator*(const Complex& a, float s) { return {a.re * s, a.im * s}; }
inline Complex times(const Complex& a, float re, float im) { return {a.re * re - a.im * im, a.re * im + a.im * re}; }
inline Complex minus_i(const Complex& a) { return {a.im, -a.re}; }  // a * -i

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// ln x for positive normal x: cephes' logf, whose polynomial is good to half a unit in the last place of the result.
inline Vec logarithm(Vec x) {
    Int bits;
    std::memcpy(&bits, &x, sizeof bits);
    Int exponent = (bits >> 23) - 126;
    Int mantissa_bits = (bits & 0x007fffff) | 0x3f000000;
    Vec m;
    std::memcpy(&m, &mantissa_bits, sizeof m);  // [0.5, 1)
    const Int small = m < 0.707106781186547524f;
    exponent += small;  // -1 where true
    Vec extra = small ? m : Vec{};
    m = m - 1.0f + extra;
    const Vec e = __builtin_convertvector(exponent, Vec);
    const Vec z = m * m;
    Vec y = m * 7.0376836292E-2f - 1.1514610310E-1f;
    y = y * m + 1.1676998740E-1f;
    y = y * m - 1.2420140846E-1f;
    y = y * m + 1.4249322787E-1f;
    y = y * m - 1.6668057665E-1f;
    y = y * m + 2.0000714765E-1f;
    y = y * m - 2.4999993993E-1f;
    y = y * m + 3.3333331174E-1f;
    y = y * m * z;
    y = y + e * -2.12194440e-4f;
    y = y - z * 0.5f;
    return m + y + e * 0.693359375f;
}

inline Vec root(Vec x) {
    for (int i = 0; i < kLanes; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// Eight periods of one block: 64 outputs, each summed over its taps in order.
template <int kPeriods>
inline void block_of(const float* values, int taps, const float* x, int64_t period, float* y, int64_t stride) {
    Vec8 sum[kPeriods] = {};
    for (int tap = 0; tap < taps; tap++) {
        const Vec8 value = *reinterpret_cast<const Vec8u*>(values + 8 * tap);
        for (int k = 0; k < kPeriods; k++) sum[k] = sum[k] + value * x[k * period + tap];
    }
    for (int k = 0; k < kPeriods; k++) *reinterpret_cast<Vec8u*>(y + k * stride) = sum[k];
}

void resample(const ResampleTable& t, const float* x, float* y, int64_t count) {
    constexpr int kTogether = 8;
    const int blocks = static_cast<int>(t.first.size());
    const int64_t whole = count / t.to;
    int64_t period = 0;
    for (; period + kTogether <= whole; period += kTogether) {
        const float* at = x + period * t.from - t.left;
        for (int b = 0; b < blocks; b++)
            block_of<kTogether>(&t.values[t.offset[b]], t.taps[b], at + t.first[b], t.from, y + period * t.to + 8 * b,
                                t.to);
    }
    for (; period * t.to < count; period++) {
        const float* at = x + period * t.from - t.left;
        for (int b = 0; b < blocks; b++) {
            const int64_t place = period * t.to + 8 * b;
            if (place >= count) return;
            float last[8];
            float* target = place + 8 <= count ? y + place : last;
            block_of<1>(&t.values[t.offset[b]], t.taps[b], at + t.first[b], 0, target, 0);
            if (target == last) std::memcpy(y + place, last, sizeof(float) * static_cast<size_t>(count - place));
        }
    }
}

// One stage of a decimation-in-frequency FFT, in place: groups of n elements, butterflies of `radix` of them.
template <int kRadix>
void stage(Complex* z, int total, int n, const float* twiddle) {
    const int m = n / kRadix;
    for (int group = 0; group < total; group += n) {
        Complex* at = z + group;
        const float* w = twiddle;
        for (int j = 0; j < m; j++, at++, w += 2 * (kRadix - 1)) {
            if constexpr (kRadix == 2) {
                const Complex a = at[0], b = at[m];
                at[0] = a + b;
                at[m] = times(a - b, w[0], w[1]);
            } else if constexpr (kRadix == 3) {
                const Complex a = at[0], sum = at[m] + at[2 * m], rest = at[m] - at[2 * m];
                const Complex half = a - sum * 0.5f, turned = minus_i(rest * 0.866025403784438647f);
                at[0] = a + sum;
                at[m] = times(half + turned, w[0], w[1]);
                at[2 * m] = times(half - turned, w[2], w[3]);
            } else if constexpr (kRadix == 4) {
                const Complex s02 = at[0] + at[2 * m], d02 = at[0] - at[2 * m];
                const Complex s13 = at[m] + at[3 * m], d13 = minus_i(at[m] - at[3 * m]);
                at[0] = s02 + s13;
                at[m] = times(d02 + d13, w[0], w[1]);
                at[2 * m] = times(s02 - s13, w[2], w[3]);
                at[3 * m] = times(d02 - d13, w[4], w[5]);
            } else if constexpr (kRadix == 5) {
                constexpr float c1 = 0.309016994374947424f, c2 = -0.809016994374947424f;
                constexpr float s1 = 0.951056516295153572f, s2 = 0.587785252292473129f;
                const Complex a = at[0], p1 = at[m] + at[4 * m], p2 = at[2 * m] + at[3 * m];
                const Complex q1 = at[m] - at[4 * m], q2 = at[2 * m] - at[3 * m];
                const Complex u1 = a + p1 * c1 + p2 * c2, u2 = a + p1 * c2 + p2 * c1;
                const Complex v1 = minus_i(q1 * s1 + q2 * s2), v2 = minus_i(q1 * s2 - q2 * s1);
                at[0] = a + p1 + p2;
                at[m] = times(u1 + v1, w[0], w[1]);
                at[2 * m] = times(u2 + v2, w[2], w[3]);
                at[3 * m] = times(u2 - v2, w[4], w[5]);
                at[4 * m] = times(u1 - v1, w[6], w[7]);
            } else {  // 8: two fours, and a stage of twos
                constexpr float r = 0.707106781186547524f;
                Complex a[8];
                for (int i = 0; i < 4; i++) {
                    const Complex s = at[i * m] + at[(i + 4) * m], d = at[i * m] - at[(i + 4) * m];
                    a[i] = s;
                    a[i + 4] = d;
                }
                a[5] = Complex{a[5].re + a[5].im, a[5].im - a[5].re} * r;   // * exp(-i pi/4)
                a[6] = minus_i(a[6]);
                a[7] = Complex{a[7].im - a[7].re, -(a[7].re + a[7].im)} * r;  // * exp(-3 i pi/4)
                for (int h = 0; h < 8; h += 4) {
                    const Complex s02 = a[h] + a[h + 2], d02 = a[h] - a[h + 2];
                    const Complex s13 = a[h + 1] + a[h + 3], d13 = minus_i(a[h + 1] - a[h + 3]);
                    a[h] = s02 + s13;
                    a[h + 1] = d02 + d13;
                    a[h + 2] = s02 - s13;
                    a[h + 3] = d02 - d13;
                }
                at[0] = a[0];
                at[m] = times(a[4], w[0], w[1]);
                at[2 * m] = times(a[1], w[2], w[3]);
                at[3 * m] = times(a[5], w[4], w[5]);
                at[4 * m] = times(a[2], w[6], w[7]);
                at[5 * m] = times(a[6], w[8], w[9]);
                at[6 * m] = times(a[3], w[10], w[11]);
                at[7 * m] = times(a[7], w[12], w[13]);
            }
        }
    }
}

void transform(const FftPlan& plan, Complex* z) {
    const int total = plan.n;
    int n = total;
    const float* w = plan.twiddles.data();
    for (const int radix : plan.radices) {
        switch (radix) {
            case 2: stage<2>(z, total, n, w); break;
            case 3: stage<3>(z, total, n, w); break;
            case 4: stage<4>(z, total, n, w); break;
            case 5: stage<5>(z, total, n, w); break;
            default: stage<8>(z, total, n, w); break;
        }
        w += 2 * (radix - 1) * (n / radix);
        n /= radix;
    }
}

// |X[k]|^2 of a real signal from the FFT of its even samples (real part) and odd samples (imaginary part).
void spectrum(const FeaturePlan& plan, const Complex* z, Vec* energy) {
    const int half = plan.size / 2;
    const Complex first = z[plan.fft.place[0]];
    const Vec low = first.re + first.im, high = first.re - first.im;
    energy[0] = low * low;
    energy[half] = high * high;
    for (const int32_t k : plan.order) {
        const Complex a = z[plan.fft.place[k]], b = z[plan.fft.place[half - k]];
        const Complex even = {(a.re + b.re) * 0.5f, (a.im - b.im) * 0.5f};
        const Complex odd = times({(a.im + b.im) * 0.5f, (b.re - a.re) * 0.5f}, plan.unpack[2 * k], plan.unpack[2 * k + 1]);
        const Complex x = even + odd, y = even - odd;
        energy[k] = x.re * x.re + x.im * x.im;
        energy[half - k] = y.re * y.re + y.im * y.im;
    }
    if (!plan.power)
        for (int k = 0; k <= half; k++) energy[k] = root(energy[k]);
}

// One step of a transposition: where bit `kStep` of the place differs, two rows change places.
template <int kStep, size_t... kPlace>
inline void exchange(Vec& a, Vec& b, std::index_sequence<kPlace...>) {
    const Vec low = __builtin_shufflevector(a, b, ((kPlace & kStep) ? kPlace - kStep + kLanes : kPlace)...);
    b = __builtin_shufflevector(a, b, ((kPlace & kStep) ? kPlace + kLanes : kPlace + kStep)...);
    a = low;
}

template <int kStep>
inline void transpose_from(Vec* rows) {
    if constexpr (kStep < kLanes) {
        for (int i = 0; i < kLanes; i++)
            if ((i & kStep) == 0) exchange<kStep>(rows[i], rows[i + kStep], std::make_index_sequence<kLanes>());
        transpose_from<2 * kStep>(rows);
    }
}

// Samples of kLanes frames, one vector for each sample of a frame.
void gather(const float* x, int hop, int window, int frames, Vec* samples) {
    const float* at[kLanes];
    for (int lane = 0; lane < kLanes; lane++) at[lane] = x + static_cast<int64_t>(lane < frames ? lane : 0) * hop;
    int i = 0;
    for (; i + kLanes <= window; i += kLanes) {
        Vec rows[kLanes];
        for (int lane = 0; lane < kLanes; lane++) rows[lane] = *reinterpret_cast<const Unaligned*>(at[lane] + i);
        transpose_from<1>(rows);
        for (int k = 0; k < kLanes; k++) samples[i + k] = rows[k];
    }
    for (; i < window; i++) {
        Vec v = {};
        for (int lane = 0; lane < kLanes; lane++) v[lane] = at[lane][i];
        samples[i] = v;
    }
}

// Numbers of kLanes frames, one vector for each number, to one row for each frame.
void scatter(const Vec* from, int width, int frames, float* out) {
    int c = 0;
    for (; c + kLanes <= width; c += kLanes) {
        Vec rows[kLanes];
        for (int k = 0; k < kLanes; k++) rows[k] = from[c + k];
        transpose_from<1>(rows);
        for (int lane = 0; lane < frames; lane++)
            *reinterpret_cast<Unaligned*>(out + static_cast<int64_t>(lane) * width + c) = rows[lane];
    }
    for (; c < width; c++)
        for (int lane = 0; lane < frames; lane++) out[static_cast<int64_t>(lane) * width + c] = from[c][lane];
}

void features(const FeaturePlan& plan, const float* x, int64_t frames, float* out, float* scratch) {
    const int half = plan.size / 2;
    Vec* samples = reinterpret_cast<Vec*>(scratch);                   // (window,); later the bands
    Complex* z = reinterpret_cast<Complex*>(samples + (plan.window > plan.bands ? plan.window : plan.bands));
    Vec* energy = reinterpret_cast<Vec*>(z + half);                   // (half + 1,)
    Vec* shaped = reinterpret_cast<Vec*>(z);                          // samples, two by two complex numbers
    for (int64_t frame = 0; frame < frames; frame += kLanes) {
        const int now = frames - frame < kLanes ? static_cast<int>(frames - frame) : kLanes;
        gather(x + frame * plan.hop, plan.hop, plan.window, now, samples);
        Vec mean = {};
        if (plan.remove_mean) {
            Vec part[4] = {};  // four sums, so that additions do not wait for each other
            int i = 0;
            for (; i + 4 <= plan.window; i += 4)
                for (int p = 0; p < 4; p++) part[p] = part[p] + samples[i + p];
            for (; i < plan.window; i++) part[0] = part[0] + samples[i];
            mean = ((part[0] + part[1]) + (part[2] + part[3])) / static_cast<float>(plan.window);
        }
        Vec* target = shaped;
        for (int i = 0; i < plan.lead; i++) target[i] = Vec{};
        target += plan.lead;
        Vec before = samples[0] - mean;
        for (int i = 0; i < plan.window; i++) {
            const Vec here = samples[i] - mean;
            target[i] = (here - before * plan.emphasis) * plan.shape[i];
            before = here;
        }
        for (int i = plan.lead + plan.window; i < plan.size; i++) shaped[i] = Vec{};
        transform(plan.fft, z);
        spectrum(plan, z, energy);
        Vec* bands = samples;
        const float* weight = plan.band_values.data();
        for (int band = 0; band < plan.bands; band++) {
            const Vec* at = energy + plan.band_first[band];
            Vec sum = {};
            for (int i = 0; i < plan.band_count[band]; i++) sum = sum + at[i] * *weight++;
            bands[band] = plan.scale != 0.0f ? logarithm(larger(sum, Vec{} + plan.floor)) * plan.scale : sum;
        }
        const Vec* made = bands;
        if (!plan.cosines.empty()) {
            for (int c = 0; c < plan.outputs; c++) {
                Vec sum = {};
                for (int band = 0; band < plan.bands; band++) sum = sum + bands[band] * plan.cosines[c * plan.bands + band];
                energy[c] = sum;
            }
            made = energy;
        }
        scatter(made, plan.outputs, now, out + frame * plan.outputs);
    }
}

void mdct(const MdctPlan& plan, float* const* rows, int count, float* scratch) {
    const int size = plan.size, half = size / 2;
    Vec* x = reinterpret_cast<Vec*>(scratch);             // (size,)
    Complex* z = reinterpret_cast<Complex*>(x + size);    // (half,)
    for (int first = 0; first < count; first += kLanes) {
        const int now = count - first < kLanes ? count - first : kLanes;
        for (int i = 0; i < size; i += kLanes) {  // sizes are powers of two from 32 on
            Vec part[kLanes];
            for (int lane = 0; lane < kLanes; lane++)
                part[lane] = *reinterpret_cast<const Unaligned*>(rows[first + (lane < now ? lane : 0)] + i);
            transpose_from<1>(part);
            for (int k = 0; k < kLanes; k++) x[i + k] = part[k];
        }
        for (int k = 0; k < half; k++)
            z[k] = times({x[2 * k], x[size - 1 - 2 * k]}, plan.turns[2 * k], plan.turns[2 * k + 1]);
        transform(plan.fft, z);
        for (int k = 0; k < half; k++) {
            const Complex y = times(z[plan.fft.place[k]], plan.turns[2 * k], plan.turns[2 * k + 1]);
            x[2 * k] = y.re;
            x[size - 1 - 2 * k] = -y.im;
        }
        for (int i = 0; i < size; i += kLanes) {
            Vec part[kLanes];
            for (int k = 0; k < kLanes; k++) part[k] = x[i + k];
            transpose_from<1>(part);
            for (int lane = 0; lane < now; lane++) *reinterpret_cast<Unaligned*>(rows[first + lane] + i) = part[lane];
        }
    }
}

int64_t scratch(const FeaturePlan& plan) {
    const int64_t samples = plan.window > plan.bands ? plan.window : plan.bands;
    const int64_t energies = plan.size / 2 + 1 > plan.outputs ? plan.size / 2 + 1 : plan.outputs;
    return kLanes * (samples + plan.size + energies);
}

}  // namespace

extern const Kernels table;
const Kernels table = {UNISONO_NAME(UNISONO_ISA), resample, features, mdct, scratch, kLanes};

}  // namespace UNISONO_ISA
}  // namespace unisono
