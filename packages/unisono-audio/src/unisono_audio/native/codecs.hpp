// Decoding: bytes of a recording to mono samples of a window of it.
//
// WAV and Ogg Vorbis are read here. For all else the core calls the codecs of the packages miniaudio (dr_flac) and soundfile
// (libsndfile) by addresses that Python hands over, in its own threads and without Python's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace unisono {

struct Kernels;

// Bounds that hold whatever a header says.
constexpr int kLeastRate = 1000, kMostRate = 1'000'000, kMostChannels = 64;
constexpr int64_t kMostState = int64_t{64} << 20;   // bytes that a codec may allocate for itself
constexpr int64_t kMostFrames = int64_t{1} << 28;   // samples of a window at its own rate

struct Bytes {
    const uint8_t* data = nullptr;
    int64_t size = 0;
};

// A recording that cannot be used; what() ends a sentence that begins with its name.
struct BadRecording : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A format that only FFmpeg decodes; what() is its name.
struct NeedsFFmpeg : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Addresses of functions, 0 where a package is not installed. See native_core.py.
struct Codecs {
    void *flac_open = nullptr, *flac_read = nullptr, *flac_seek = nullptr, *flac_close = nullptr;
    void *snd_open = nullptr, *snd_read = nullptr, *snd_seek = nullptr, *snd_close = nullptr, *snd_error = nullptr;
};

struct Header {
    std::string format;   // wav, flac, vorbis, mp3, other
    int rate = 0, channels = 0;
    int64_t frames = -1;  // -1: it does not say
};

// Where to cut: seconds from the start, or, where `start` is negative, a place in [0, 1] of the room there is.
struct Window {
    double start = 0.0, place = 0.0;
    double duration = 0.0;  // seconds; 0 for all
};

// Room that decoding reuses.
struct Room {
    std::vector<float> interleaved;
    std::vector<std::shared_ptr<const void>> setups;  // headers of Vorbis that were met last
    const Kernels* kernels = nullptr;                 // for what is computed
};

// What the header says.
Header probe(const Codecs& codecs, Bytes bytes);

// The window's samples, mixed to mono. `samples` gets `left` zeros before them; returns how many follow.
struct Decoded {
    int rate = 0;
    int64_t start = 0, count = 0;
};
Decoded decode(const Codecs& codecs, Bytes bytes, const Window& window, Room& room, std::vector<float>& samples,
               int64_t (*left_of)(int rate, void* context), void* context);

}  // namespace unisono
