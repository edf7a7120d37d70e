// A recording that is open, and the formats that this core reads by itself.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codecs.hpp"

namespace unisono {

struct Stream {
    Header header;
    bool mixed = false;  // `read` gives mono already
    virtual ~Stream() = default;
    virtual void seek(int64_t frame) = 0;
    virtual int64_t read(float* interleaved, int64_t frames) = 0;  // fewer at the end
};

inline uint32_t little(const uint8_t* at, int bytes) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++) value |= static_cast<uint32_t>(at[i]) << (8 * i);
    return value;
}

inline bool starts(Bytes bytes, int64_t at, const char* text, int length) {
    return bytes.size >= at + length && std::memcmp(bytes.data + at, text, static_cast<size_t>(length)) == 0;
}

[[noreturn]] inline void cannot_seek(int64_t frame) {
    throw BadRecording("cannot be decoded from frame " + std::to_string(frame) + " on: it is damaged or cut off");
}

void check(const Header& header);  // refuse absurd rates and channels

std::unique_ptr<Stream> open_vorbis(Bytes bytes, Room& room);

}  // namespace unisono
