// Floor 1: the coarse shape of a spectrum, lines between points (Vorbis I, section 7.2).
#include <cmath>
#include <cstdlib>

#include "vorbis_setup.hpp"

namespace unisono::vorbis {
namespace {

const float* decibels() {  // section 10.1: 256 steps of equal ratio up to 1
    static const std::vector<float> table = [] {
        std::vector<float> values(256);
        for (int i = 0; i < 256; i++)
            values[static_cast<size_t>(i)] = static_cast<float>(std::pow(1.0649863e-07, (255 - i) / 255.0));
        return values;
    }();
    return table.data();
}

}  // namespace

// The points of a channel's floor (section 7.2.3), negative where one is not drawn; false for a channel without.
bool read_floor(Bits& bits, const Setup& setup, const Floor& floor, int32_t* points) {
    if (!bits.read(1)) return false;
    static constexpr int kRanges[4] = {256, 128, 86, 64};
    const int range = kRanges[floor.multiplier - 1], width = bits_of(static_cast<uint32_t>(range - 1));
    int32_t y[80];
    y[0] = static_cast<int32_t>(bits.read(width));
    y[1] = static_cast<int32_t>(bits.read(width));
    int at = 2;
    for (const uint8_t c : floor.partitions) {
        uint32_t value = 0;
        if (floor.subclasses[c]) {
            const int entry = setup.books[floor.master[c]].decode(bits);
            if (entry < 0) return false;
            value = static_cast<uint32_t>(entry);
        }
        for (int i = 0; i < floor.dimensions[c]; i++) {
            const int book = floor.books[c][value & ((1u << floor.subclasses[c]) - 1)];
            value >>= floor.subclasses[c];
            y[at] = book < 0 ? 0 : setup.books[static_cast<size_t>(book)].decode(bits);
            if (y[at] < 0) return false;
            at++;
        }
    }
    if (bits.ended()) return false;
    bool drawn[80];
    drawn[0] = drawn[1] = true;
    points[0] = std::min(y[0], range - 1);
    points[1] = std::min(y[1], range - 1);
    for (int i = 2; i < floor.count; i++) {
        const int low = floor.low[i], high = floor.high[i];
        const int dy = points[high] - points[low], dx = floor.x[high] - floor.x[low];
        const int off = std::abs(dy) * (floor.x[i] - floor.x[low]) / dx;
        const int predicted = points[low] + (dy < 0 ? -off : off);
        const int above = range - predicted, below = predicted, room = 2 * std::min(above, below);
        int value = predicted;
        drawn[i] = y[i] != 0;
        if (y[i] != 0) {
            drawn[low] = drawn[high] = true;
            if (y[i] >= room) value = above > below ? y[i] - below + predicted : predicted - y[i] + above - 1;
            else value = y[i] & 1 ? predicted - (y[i] + 1) / 2 : predicted + y[i] / 2;
        }
        points[i] = std::clamp(value, 0, range - 1);
    }
    for (int i = 0; i < floor.count; i++)
        if (!drawn[i]) points[i] = -1 - points[i];
    return true;
}

// Multiply a spectrum by the floor's curve: lines from point to point, in integers as the specification has them.
void apply_floor(const Floor& floor, const int32_t* points, float* own, int m) {
    const float* table = decibels();
    int x = 0, y = points[0] * floor.multiplier;
    for (int i = 1; i < floor.count && x < m; i++) {
        const int point = floor.order[i];
        if (points[point] < 0) continue;
        const int next = floor.x[point], target = points[point] * floor.multiplier;
        const int dx = next - x, dy = target - y, base = dy / dx, step = dy < 0 ? base - 1 : base + 1;
        const int rest = std::abs(dy) - std::abs(base) * dx, end = std::min(next, m);
        int error = 0;
        for (int k = x; k < end; k++) {
            own[k] *= table[y & 255];
            error += rest;
            const bool over = error >= dx;
            error -= over ? dx : 0;
            y += over ? step : base;
        }
        x = next;
        y = target;
    }
    for (int k = x; k < m; k++) own[k] *= table[y & 255];
}

}  // namespace unisono::vorbis
