#include "codecs.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "ogg.hpp"
#include "stream.hpp"

namespace unisono {
namespace {

constexpr int64_t kChunk = 8192;  // frames that are decoded at a time

}  // namespace

void check(const Header& header) {
    if (header.channels < 1) throw BadRecording("has no channels");
    if (header.channels > kMostChannels)
        throw BadRecording("has " + std::to_string(header.channels) + " channels; at most " +
                           std::to_string(kMostChannels) + " are read");
    if (header.rate < kLeastRate || header.rate > kMostRate)
        throw BadRecording("has a sample rate of " + std::to_string(header.rate) + " Hz; rates from " +
                           std::to_string(kLeastRate) + " to " + std::to_string(kMostRate) + " Hz are read");
}

namespace {

// WAV -----------------------------------------------------------------------------------------------------------------

struct Wav final : Stream {
    Bytes bytes;
    int64_t first = 0, at = 0;
    int bits = 0;
    bool real = false;

    explicit Wav(Bytes all) : bytes(all) {
        header.format = "wav";
        int64_t chunk = 12;
        int kind = 0;
        bool described = false;
        while (true) {
            if (chunk + 8 > bytes.size)
                throw BadRecording(described ? "is cut off: it has no samples" : "is a WAV without a format");
            int64_t size = little(bytes.data + chunk + 4, 4);
            const uint8_t* body = bytes.data + chunk + 8;
            const int64_t left = bytes.size - chunk - 8;
            if (starts(bytes, chunk, "fmt ", 4)) {
                if (described) throw BadRecording("is a WAV with two formats");
                if (size < 16 || left < size) throw BadRecording("is a WAV whose format is cut off");
                kind = static_cast<int>(little(body, 2));
                header.channels = static_cast<int>(little(body + 2, 2));
                const uint32_t rate = little(body + 4, 4);
                header.rate = rate > 0x7fffffffu ? 0x7fffffff : static_cast<int>(rate);
                bits = static_cast<int>(little(body + 14, 2));
                const int align = static_cast<int>(little(body + 12, 2));
                if (kind == 0xfffe && size >= 26) kind = static_cast<int>(little(body + 24, 2));
                check(header);
                if (align != header.channels * bits / 8) kind = -1;
                described = true;
            } else if (starts(bytes, chunk, "data", 4)) {
                if (!described) throw BadRecording("is a WAV without a format before its samples");
                real = kind == 3 && (bits == 32 || bits == 64);
                const bool whole = kind == 1 && (bits == 8 || bits == 16 || bits == 24 || bits == 32);
                if (!real && !whole) {
                    header.format = "other";  // a compressed one: libsndfile's
                    return;
                }
                first = chunk + 8;
                const int64_t width = static_cast<int64_t>(header.channels) * bits / 8;
                if (size == 0xffffffff || (size == 0 && left > 0)) size = left / width * width;  // written as a stream
                if (size > left)
                    throw BadRecording("is cut off: its header says " + std::to_string(size / width) +
                                       " frames, and there are " + std::to_string(left / width));
                header.frames = size / width;
                for (int64_t next = chunk + 8 + size + (size & 1); next + 8 <= bytes.size;) {
                    if (starts(bytes, next, "data", 4) || starts(bytes, next, "RIFF", 4))
                        throw BadRecording("holds several blocks of samples, of which other programs read the first "
                                           "alone; write it again with all of them in one");
                    const int64_t length = little(bytes.data + next + 4, 4);
                    next += 8 + length + (length & 1);
                }
                return;
            }
            chunk += 8 + size + (size & 1);
        }
    }
    void seek(int64_t frame) override { at = frame; }
    int64_t read(float* to, int64_t frames) override {
        frames = std::min(frames, header.frames - at);
        const int64_t count = frames * header.channels;
        const uint8_t* from = bytes.data + first + at * header.channels * (bits / 8);
        at += frames;
        switch (real ? -bits : bits) {
            case 8:
                for (int64_t i = 0; i < count; i++) to[i] = static_cast<float>(from[i] - 128) * (1.0f / 128.0f);
                break;
            case 16:
                for (int64_t i = 0; i < count; i++) {
                    int16_t value;
                    std::memcpy(&value, from + 2 * i, 2);
                    to[i] = static_cast<float>(value) * (1.0f / 32768.0f);
                }
                break;
            case 24:
                for (int64_t i = 0; i < count; i++)
                    to[i] = static_cast<float>(static_cast<int32_t>(little(from + 3 * i, 3) << 8) >> 8) *
                            (1.0f / 8388608.0f);
                break;
            case 32:
                for (int64_t i = 0; i < count; i++) {
                    int32_t value;
                    std::memcpy(&value, from + 4 * i, 4);
                    to[i] = static_cast<float>(value) * (1.0f / 2147483648.0f);
                }
                break;
            case -32: std::memcpy(to, from, static_cast<size_t>(4 * count)); break;
            default:
                for (int64_t i = 0; i < count; i++) {
                    double value;
                    std::memcpy(&value, from + 8 * i, 8);
                    to[i] = static_cast<float>(value);
                }
        }
        return frames;
    }
};

// FLAC, by dr_flac ----------------------------------------------------------------------------------------------------

// dr_flac's allocator: no more than kMostState at a time.
struct Allocator {
    void* user = nullptr;
    void* (*on_malloc)(size_t, void*) = [](size_t size, void*) {
        return size > static_cast<size_t>(kMostState) ? nullptr : std::malloc(size);
    };
    void* (*on_realloc)(void*, size_t, void*) = [](void* old, size_t size, void*) {
        return size > static_cast<size_t>(kMostState) ? nullptr : std::realloc(old, size);
    };
    void (*on_free)(void*, void*) = [](void* old, void*) { std::free(old); };
};

struct Flac final : Stream {
    const Codecs& codecs;
    std::vector<uint8_t> unpacked;  // which `bytes` lie in, unless they are the file's own
    void* handle = nullptr;
    Allocator allocator;

    Flac(const Codecs& all, Bytes bytes, std::vector<uint8_t> own = {}) : codecs(all), unpacked(std::move(own)) {
        header.format = "flac";
        if (bytes.size < 42) throw BadRecording("is cut off in its header");
        if ((bytes.data[4] & 0x7f) != 0) throw BadRecording("is a FLAC without a header of its stream");
        const uint8_t* info = bytes.data + 8;  // STREAMINFO, RFC 9639 section 8.2
        header.rate = info[10] << 12 | info[11] << 4 | info[12] >> 4;
        header.channels = (info[12] >> 1 & 7) + 1;
        const uint32_t low = static_cast<uint32_t>(info[14]) << 24 | info[15] << 16 | info[16] << 8 | info[17];
        header.frames = static_cast<int64_t>(info[13] & 15) << 32 | low;
        if (header.frames == 0) header.frames = -1;
        check(header);
        handle = reinterpret_cast<void* (*)(const void*, size_t, const Allocator*)>(codecs.flac_open)(
            bytes.data, static_cast<size_t>(bytes.size), &allocator);
        if (handle == nullptr) throw BadRecording("cannot be decoded as FLAC: its headers are damaged");
    }
    ~Flac() override {
        if (handle != nullptr) reinterpret_cast<void (*)(void*)>(codecs.flac_close)(handle);
    }
    void seek(int64_t frame) override {
        if (!reinterpret_cast<uint32_t (*)(void*, unsigned long long)>(codecs.flac_seek)(
                handle, static_cast<unsigned long long>(frame)))
            cannot_seek(frame);
    }
    int64_t read(float* to, int64_t frames) override {
        return static_cast<int64_t>(reinterpret_cast<unsigned long long (*)(void*, unsigned long long, float*)>(
            codecs.flac_read)(handle, static_cast<unsigned long long>(frames), to));
    }
};

// FLAC in Ogg (xiph.org/flac/ogg_mapping.html): packets, one behind the other, are a FLAC behind 9 bytes of the first.
constexpr int64_t kFlacMapping = 9;

std::unique_ptr<Stream> open_ogg_flac(const Codecs& codecs, Bytes bytes) {
    Packets packets(bytes);
    packets.go(0);
    std::vector<uint8_t> flac;
    const uint8_t* data;
    int64_t size;
    size_t page;
    for (bool last; packets.next(data, size, page, last);) flac.insert(flac.end(), data, data + size);
    if (static_cast<int64_t>(flac.size()) < kFlacMapping) throw BadRecording("is cut off in its header");
    const Bytes inner{flac.data() + kFlacMapping, static_cast<int64_t>(flac.size()) - kFlacMapping};
    return std::make_unique<Flac>(codecs, inner, std::move(flac));
}

// All others, by libsndfile -------------------------------------------------------------------------------------------

struct Memory {
    Bytes bytes;
    int64_t at = 0;
};
struct VirtualFile {  // SF_VIRTUAL_IO
    int64_t (*length)(void*) = [](void* user) { return static_cast<Memory*>(user)->bytes.size; };
    int64_t (*seek)(int64_t, int, void*) = [](int64_t offset, int whence, void* user) {
        auto* memory = static_cast<Memory*>(user);
        const int64_t base = whence == 0 ? 0 : whence == 1 ? memory->at : memory->bytes.size;
        memory->at = std::clamp<int64_t>(base + offset, 0, memory->bytes.size);
        return memory->at;
    };
    int64_t (*read)(void*, int64_t, void*) = [](void* to, int64_t count, void* user) {
        auto* memory = static_cast<Memory*>(user);
        count = std::clamp<int64_t>(count, 0, memory->bytes.size - memory->at);
        std::memcpy(to, memory->bytes.data + memory->at, static_cast<size_t>(count));
        memory->at += count;
        return count;
    };
    int64_t (*write)(const void*, int64_t, void*) = [](const void*, int64_t, void*) { return int64_t{0}; };
    int64_t (*tell)(void*) = [](void* user) { return static_cast<Memory*>(user)->at; };
};
struct SoundInfo {  // SF_INFO
    int64_t frames = 0;
    int rate = 0, channels = 0, format = 0, sections = 0, seekable = 0;
};

struct Sound final : Stream {
    const Codecs& codecs;
    Memory memory;
    VirtualFile file;
    void* handle = nullptr;

    Sound(const Codecs& all, Bytes bytes) : codecs(all), memory{bytes, 0} {
        SoundInfo info;
        handle = reinterpret_cast<void* (*)(VirtualFile*, int, SoundInfo*, void*)>(codecs.snd_open)(
            &file, 0x10, &info, &memory);  // SFM_READ
        if (handle == nullptr)
            throw BadRecording(std::string("cannot be decoded: ") +
                               reinterpret_cast<const char* (*)(void*)>(codecs.snd_error)(nullptr));
        const int kind = info.format & 0x0fff0000;
        header = {kind == 0x230000 ? "mp3" : kind == 0x170000 ? "flac" : "other", info.rate, info.channels, info.frames};
        if (header.frames <= 0 || header.frames == INT64_MAX) header.frames = -1;
        try {
            check(header);
        } catch (...) {
            close();
            throw;
        }
    }
    ~Sound() override { close(); }
    void close() {
        if (handle != nullptr) reinterpret_cast<int (*)(void*)>(codecs.snd_close)(handle);
        handle = nullptr;
    }
    void seek(int64_t frame) override {
        if (reinterpret_cast<int64_t (*)(void*, int64_t, int)>(codecs.snd_seek)(handle, frame, 0) != frame)
            cannot_seek(frame);
    }
    int64_t read(float* to, int64_t frames) override {
        return reinterpret_cast<int64_t (*)(void*, float*, int64_t)>(codecs.snd_read)(handle, to, frames);
    }
};

std::string beginning(Bytes bytes) {
    std::string text = "it begins with '";
    for (int64_t i = 0; i < std::min<int64_t>(bytes.size, 12); i++) {
        const uint8_t c = bytes.data[i];
        text += c >= 32 && c < 127 && c != '\'' ? static_cast<char>(c) : '.';
    }
    return text + "'";
}

// The byte behind an ID3 tag at the beginning of a file, which may precede a FLAC; 0 without one.
int64_t behind_id3(Bytes bytes) {
    if (!starts(bytes, 0, "ID3", 3) || bytes.size < 10) return 0;
    const uint8_t* const size = bytes.data + 6;
    return 10 + ((size[0] & 127) << 21 | (size[1] & 127) << 14 | (size[2] & 127) << 7 | (size[3] & 127));
}

void need(const void* function, const char* package) {
    if (function == nullptr)
        throw BadRecording(std::string("cannot be decoded without the package ") + package +
                           ": pip install unisono-audio");
}

std::unique_ptr<Stream> open(const Codecs& codecs, Bytes bytes, Room& room) {
    if (bytes.size == 0) throw BadRecording("is empty");
    if (starts(bytes, 0, "RIFF", 4) && starts(bytes, 8, "WAVE", 4)) {
        auto wav = std::make_unique<Wav>(bytes);
        if (wav->header.format == "wav") return wav;
    } else if (const int64_t at = behind_id3(bytes); starts(bytes, at, "fLaC", 4)) {
        need(codecs.flac_open, "miniaudio");
        return std::make_unique<Flac>(codecs, Bytes{bytes.data + at, bytes.size - at});
    } else if (starts(bytes, 0, "OggS", 4)) {
        const int64_t packet = bytes.size > 26 ? 27 + bytes.data[26] : 0;  // wherever the first page's content begins
        if (starts(bytes, packet, "\1vorbis", 7)) return open_vorbis(bytes, room);
        if (starts(bytes, packet, "OpusHead", 8)) throw NeedsFFmpeg("Opus");
        if (starts(bytes, packet, "\x7f" "FLAC", 5)) {
            need(codecs.flac_open, "miniaudio");
            return open_ogg_flac(codecs, bytes);
        }
        Packets whole(bytes);  // of another codec, which libsndfile reads: one stream, and not cut off
    } else if (starts(bytes, 4, "ftyp", 4)) {
        throw NeedsFFmpeg("MPEG-4 audio (AAC)");
    } else if (bytes.size > 2 && bytes.data[0] == 0xff && (bytes.data[1] & 0xf6) == 0xf0) {
        throw NeedsFFmpeg("AAC");
    } else if (starts(bytes, 0, "\x1a\x45\xdf\xa3", 4)) {
        throw NeedsFFmpeg("Matroska or WebM");
    }
    need(codecs.snd_open, "soundfile");
    const bool known = starts(bytes, 0, "ID3", 3) || starts(bytes, 0, "OggS", 4) || starts(bytes, 0, "RIFF", 4) ||
                       starts(bytes, 0, "FORM", 4) || starts(bytes, 0, ".snd", 4) || starts(bytes, 0, "caff", 4) ||
                       starts(bytes, 0, "riff", 4) || starts(bytes, 0, "RF64", 4) ||
                       (bytes.size > 2 && bytes.data[0] == 0xff && (bytes.data[1] & 0xe0) == 0xe0);
    if (!known) throw BadRecording("is not audio: " + beginning(bytes));
    return std::make_unique<Sound>(codecs, bytes);
}

}  // namespace

namespace {

constexpr int64_t kSearched = 4 << 20;  // bytes of a file that is searched for windows of it, too

// Refuse files that were put together from several, of which decoders read the first alone.
void refuse_joined(Bytes bytes, const std::string& format) {
    const uint8_t* const end = bytes.data + bytes.size;
    const auto find = [&](const uint8_t* from, const char* what, int64_t length) {
        return std::search(from, end, what, what + length);
    };
    const auto refuse = [&](const char* name, const uint8_t* at) {
        throw BadRecording("holds several " + std::string(name) + " streams, the second from byte " +
                           std::to_string(at - bytes.data) + " on; take it apart, or write it again as one");
    };
    if (format == "flac") {
        bool first = true;
        for (const uint8_t* at = bytes.data; (at = find(at, "fLaC", 4)) != end; at++) {
            if (end - at < 8 || (at[4] & 0x7f) != 0 || at[5] != 0 || at[6] != 0 || at[7] != 34) continue;
            if (!first) refuse("FLAC", at);
            first = false;
        }
    } else if (format == "mp3") {
        const uint8_t* first = nullptr;
        for (const char* name : {"Xing", "Info"})
            for (const uint8_t* at = bytes.data; (at = find(at, name, 4)) != end; at++)
                for (const int64_t side : {9, 17, 32}) {  // bytes of side information, which are zero in such a frame
                    if (at - bytes.data < side + 4) continue;
                    const uint8_t* const head = at - side - 4;
                    if (head[0] != 0xff || (head[1] & 0xe0) != 0xe0) continue;
                    if (!std::all_of(head + 4, at, [](uint8_t byte) { return byte == 0; })) continue;
                    if (first != nullptr) refuse("MP3", std::max(first, head));
                    first = head;
                    break;
                }
    }
}

}  // namespace

Header probe(const Codecs& codecs, Bytes bytes) {
    Room room;
    return open(codecs, bytes, room)->header;
}

Decoded decode(const Codecs& codecs, Bytes bytes, const Window& window, Room& room, std::vector<float>& samples,
               int64_t (*left_of)(int rate, void* context), void* context) {
    const auto stream = open(codecs, bytes, room);
    const Header& header = stream->header;
    if (window.duration <= 0 || bytes.size < kSearched) refuse_joined(bytes, header.format);
    const int64_t left = left_of(header.rate, context);
    int64_t start = 0, wanted = -1;
    if (window.duration > 0) wanted = static_cast<int64_t>(std::ceil(window.duration * header.rate));
    if (window.start >= 0) {
        const double frame = std::floor(window.start * header.rate + 0.5);
        if (header.frames >= 0 && frame >= static_cast<double>(header.frames) && frame > 0)
            throw BadRecording("has " + std::to_string(header.frames) + " frames, and the window begins at frame " +
                               std::to_string(static_cast<int64_t>(frame)));
        start = static_cast<int64_t>(frame);
    } else if (wanted >= 0 && header.frames > wanted) {
        const int64_t room_left = header.frames - wanted;
        start = std::min(room_left, static_cast<int64_t>(window.place * static_cast<double>(room_left + 1)));
    }
    int64_t expected = header.frames >= 0 ? header.frames - start : -1;  // as the header has it
    if (wanted >= 0 && expected >= 0) expected = std::min(expected, wanted);
    const int64_t most = wanted >= 0 ? std::min(wanted, kMostFrames) : kMostFrames;
    if (start > 0) stream->seek(start);

    const int channels = stream->mixed ? 1 : header.channels;
    // A header is believed only for as much as may well be there; more is made room for as it comes.
    const int64_t believed = std::min<int64_t>({expected >= 0 ? expected : kChunk, most, 64 * bytes.size + kChunk});
    samples.resize(static_cast<size_t>(left + believed));
    std::fill(samples.begin(), samples.begin() + left, 0.0f);
    room.interleaved.resize(static_cast<size_t>(channels > 1 ? kChunk * channels : 0));
    const float share = 1.0f / static_cast<float>(channels);
    int64_t count = 0;
    while (count < most) {
        const int64_t ask = std::min(kChunk, most - count);
        if (static_cast<int64_t>(samples.size()) < left + count + ask)
            samples.resize(static_cast<size_t>(std::max(left + count + ask, std::min(left + most, 2 * (left + count)))));
        float* to = samples.data() + left + count;
        int64_t got;
        if (channels == 1) {
            got = stream->read(to, ask);
        } else {
            const float* from = room.interleaved.data();
            got = stream->read(room.interleaved.data(), ask);
            if (channels == 2) {
                for (int64_t i = 0; i < got; i++) to[i] = (from[2 * i] + from[2 * i + 1]) * share;
            } else {
                for (int64_t i = 0; i < got; i++) {
                    float sum = 0.0f;
                    for (int c = 0; c < channels; c++) sum += from[i * channels + c];
                    to[i] = sum * share;
                }
            }
        }
        if (got <= 0) break;
        count += got;
    }
    if (wanted < 0 && count == kMostFrames)
        throw BadRecording("is longer than " + std::to_string(kMostFrames) + " samples; read windows of it");
    if (count == 0 && expected <= 0) throw BadRecording("has no samples");
    if (expected >= 0 && count < expected)
        throw BadRecording("is damaged or cut off: its header says " + std::to_string(header.frames) +
                           " frames, and decoding ended after " + std::to_string(start + count));
    if (header.format == "flac" && wanted < 0 && expected >= 0 && count > expected)
        throw BadRecording("is damaged: its header says " + std::to_string(header.frames) + " frames, and there are " +
                           std::to_string(start + count));
    uint32_t bad = 0;
    const float* first = samples.data() + left;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, first + i, 4);
        bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    if (bad != 0) {
        int64_t i = 0;
        while (std::isfinite(first[i])) i++;
        throw BadRecording("has samples that are not finite, the first at frame " + std::to_string(start + i));
    }
    return {header.rate, start, count};
}

}  // namespace unisono
