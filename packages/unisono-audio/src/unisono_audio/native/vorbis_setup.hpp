// What the headers of a Vorbis stream say, and the bits that they and its packets are made of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codecs.hpp"
#include "kernels.hpp"

namespace unisono::vorbis {

constexpr int kFast = 10;  // bits of a code that one look-up resolves

[[noreturn]] inline void damaged(const char* what) {
    throw BadRecording(std::string("cannot be decoded as Ogg Vorbis: ") + what);
}

// Bits of a packet, the lowest of each byte first. Beyond its end all are zero, and `ended` says so.
class Bits {
public:
    Bits(const uint8_t* data, int64_t size) : at_(data), end_(data + size), left_(8 * size) {}
    bool ended() const { return left_ < 0; }
    int64_t left() const { return left_; }
    uint32_t peek() {  // 32 of them
        fill();
        return static_cast<uint32_t>(held_);
    }
    void skip(int count) {
        held_ >>= count;
        count_ -= count;
        left_ -= count;
    }
    uint32_t read(int count) {  // up to 32
        fill();
        const uint32_t value = static_cast<uint32_t>(held_ & ((uint64_t{1} << count) - 1));
        skip(count);
        return value;
    }

private:
    void fill() {
        if (count_ >= 32) return;
        if (end_ - at_ >= 8) {
            uint64_t next;
            std::memcpy(&next, at_, 8);  // of little-endian machines, the only ones this is built for
            held_ |= next << count_;
            const int bytes = (63 - count_) >> 3;
            at_ += bytes;
            count_ += 8 * bytes;
            held_ &= count_ < 64 ? (uint64_t{1} << count_) - 1 : ~uint64_t{0};
            return;
        }
        while (count_ <= 56) {
            if (at_ < end_) held_ |= static_cast<uint64_t>(*at_++) << count_;
            count_ += 8;
        }
    }
    const uint8_t *at_, *end_;
    uint64_t held_ = 0;
    int count_ = 0;
    int64_t left_;
};

inline int bits_of(uint32_t value) { return value == 0 ? 0 : 32 - __builtin_clz(value); }

inline uint32_t reversed(uint32_t value) {
    value = (value >> 1 & 0x55555555u) | (value & 0x55555555u) << 1;
    value = (value >> 2 & 0x33333333u) | (value & 0x33333333u) << 2;
    value = (value >> 4 & 0x0f0f0f0fu) | (value & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(value);
}

struct Codebook {
    int dimensions = 0;
    int entries = 0;
    std::vector<uint32_t> fast;                        // by the next bits: length << 24 | entry; 0 for longer codes
    std::vector<std::pair<uint32_t, uint32_t>> codes;  // those, from the left of 32 bits, ascending; length << 24 | entry
    std::vector<float> values;                         // (entries, dimensions), empty where it has none

    // An entry, or -1 for bits that are no code.
    int decode(Bits& bits) const {
        const uint32_t next = bits.peek();
        uint32_t found = fast[next & ((1u << kFast) - 1)];
        if (found == 0) {
            if (codes.empty()) return -1;
            const uint32_t code = reversed(next);
            auto after = std::upper_bound(codes.begin(), codes.end(), code,
                                          [](uint32_t value, const auto& each) { return value < each.first; });
            if (after == codes.begin()) return -1;
            --after;
            found = after->second;
            const int length = static_cast<int>(found >> 24);
            if (length < 32 && (code ^ after->first) >> (32 - length) != 0) return -1;
        }
        bits.skip(static_cast<int>(found >> 24));
        return static_cast<int>(found & 0xffffff);
    }
};

struct Floor {
    std::vector<uint8_t> partitions;   // classes
    uint8_t dimensions[16], subclasses[16], master[16];
    int16_t books[16][8];
    int multiplier = 1, count = 2;
    uint16_t x[80];
    uint8_t order[80], low[80], high[80];
};

struct Residue {
    int type = 0, begin = 0, end = 0, partition = 1, classes = 1, book = 0;
    std::vector<int16_t> books;  // (classes, 8), -1 for none
};

struct Mapping {
    std::vector<std::pair<uint8_t, uint8_t>> coupling;  // magnitude, angle
    std::vector<uint8_t> submap;                        // of each channel
    std::vector<std::pair<uint8_t, uint8_t>> submaps;   // floor, residue
};

struct Mode {
    bool large = false;
    int mapping = 0;
};

// What the three headers say; many recordings share one.
struct Setup {
    std::vector<uint8_t> headers;  // as they were: the identification's and the setup's
    int rate = 0, channels = 0;
    int block[2] = {0, 0};
    std::vector<Codebook> books;
    std::vector<Floor> floors;
    std::vector<Residue> residues;
    std::vector<Mapping> mappings;
    std::vector<Mode> modes;
    std::vector<float> slope[2];  // rising half of a window, of a block of each size
    MdctPlan mdct[2];
};

// Of the identification header and the setup header.
std::shared_ptr<const Setup> setup_of(const std::vector<uint8_t>& first, const std::vector<uint8_t>& third);

// The points of a channel's floor, (80,), below 0 where one is not drawn; false for a channel that has none.
bool read_floor(Bits& bits, const Setup& setup, const Floor& floor, int32_t* points);

// Multiply a spectrum of m values by it.
void apply_floor(const Floor& floor, const int32_t* points, float* own, int m);

}  // namespace unisono::vorbis
