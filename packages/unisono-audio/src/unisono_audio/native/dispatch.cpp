// Which compilation of the kernels this CPU can run, and what a plan needs that follows from its size.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels.hpp"

namespace unisono {

#define UNISONO_DECLARE(isa) namespace isa { extern const Kernels table; }
UNISONO_DECLARE(baseline)
#ifdef UNISONO_X86
UNISONO_DECLARE(x86_64_v2)
UNISONO_DECLARE(x86_64_v3)
UNISONO_DECLARE(x86_64_v4)
#endif

std::vector<const Kernels*> all_kernels() {
    std::vector<const Kernels*> found;
#ifdef UNISONO_X86
    __builtin_cpu_init();
    const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v4) found.push_back(&x86_64_v4::table);
    if (v3) found.push_back(&x86_64_v3::table);
    if (v2) found.push_back(&x86_64_v2::table);
#endif
    found.push_back(&baseline::table);  // what the compiler takes by itself: SSE2 on x86-64, NEON on arm64
    return found;
}

const Kernels& kernels() {
    static const Kernels* best = all_kernels().front();
    return *best;
}

namespace {

int32_t place_of(int32_t k, int32_t n, const int32_t* radix) {
    if (n == 1) return 0;
    const int32_t m = n / *radix;
    return k % *radix * m + place_of(k / *radix, m, radix + 1);
}

}  // namespace

constexpr double kTurn = -2.0 * 3.14159265358979323846;

bool FftPlan::make(int points) {
    if (points < 2) return false;
    n = points;
    int rest = n;
    radices.clear();
    for (const int radix : {8, 4, 2, 3, 5})
        while (rest % radix == 0) {
            if (radix == 8 && rest == 16) break;  // 4 * 4 is quicker than 8 * 2
            radices.push_back(radix);
            rest /= radix;
        }
    if (rest != 1) return false;
    twiddles.clear();
    int left = n;
    for (const int radix : radices) {
        for (int j = 0; j < left / radix; j++)
            for (int q = 1; q < radix; q++) {
                const double angle = kTurn * static_cast<double>(j) * q / left;
                twiddles.push_back(static_cast<float>(std::cos(angle)));
                twiddles.push_back(static_cast<float>(std::sin(angle)));
            }
        left /= radix;
    }
    place.resize(static_cast<size_t>(n));
    for (int k = 0; k < n; k++) place[k] = place_of(k, n, radices.data());
    return true;
}

bool MdctPlan::make(int numbers) {
    size = numbers;
    if (size < 32 || size % 2 != 0 || !fft.make(size / 2)) return false;
    turns.resize(static_cast<size_t>(size));
    for (int k = 0; k < size / 2; k++) {
        const double angle = kTurn / 16 * (8.0 * k + 1) / size;
        turns[2 * k] = static_cast<float>(std::cos(angle));
        turns[2 * k + 1] = static_cast<float>(std::sin(angle));
    }
    return true;
}

bool plan_fft(FeaturePlan& plan) {
    if (plan.size < 4 || plan.size % 4 != 0 || !plan.fft.make(plan.size / 2)) return false;
    const int half = plan.size / 2;
    plan.order.resize(static_cast<size_t>(half / 2));
    std::iota(plan.order.begin(), plan.order.end(), 1);
    std::sort(plan.order.begin(), plan.order.end(),
              [&](int a, int b) { return plan.fft.place[a] < plan.fft.place[b]; });
    plan.unpack.resize(static_cast<size_t>(2 * (half / 2 + 1)));
    for (int k = 0; k <= half / 2; k++) {
        plan.unpack[2 * k] = static_cast<float>(std::cos(kTurn * k / plan.size));
        plan.unpack[2 * k + 1] = static_cast<float>(std::sin(kTurn * k / plan.size));
    }
    return true;
}

}  // namespace unisono
