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

bool plan_fft(FeaturePlan& plan) {
    if (plan.size < 4 || plan.size % 4 != 0) return false;
    const int half = plan.size / 2;
    int rest = half;
    plan.radices.clear();
    for (const int radix : {8, 4, 2, 3, 5})
        while (rest % radix == 0) {
            // 16 = 4 * 4 and 128 = 8 * 4 * 4 are quicker than with a stage of twos
            if (radix == 8 && (rest == 16 || rest == 2 * 8)) break;
            plan.radices.push_back(radix);
            rest /= radix;
        }
    if (rest != 1) return false;
    constexpr double turn = -2.0 * 3.14159265358979323846;
    plan.twiddles.clear();
    int n = half;
    for (const int radix : plan.radices) {
        for (int j = 0; j < n / radix; j++)
            for (int q = 1; q < radix; q++) {
                const double angle = turn * static_cast<double>(j) * q / n;
                plan.twiddles.push_back(static_cast<float>(std::cos(angle)));
                plan.twiddles.push_back(static_cast<float>(std::sin(angle)));
            }
        n /= radix;
    }
    plan.place.resize(half);
    for (int k = 0; k < half; k++) plan.place[k] = place_of(k, half, plan.radices.data());
    plan.order.resize(half / 2);
    std::iota(plan.order.begin(), plan.order.end(), 1);
    std::sort(plan.order.begin(), plan.order.end(), [&](int a, int b) { return plan.place[a] < plan.place[b]; });
    plan.unpack.resize(2 * (half / 2 + 1));
    for (int k = 0; k <= half / 2; k++) {
        plan.unpack[2 * k] = static_cast<float>(std::cos(turn * k / plan.size));
        plan.unpack[2 * k + 1] = static_cast<float>(std::sin(turn * k / plan.size));
    }
    return true;
}

}  // namespace unisono
