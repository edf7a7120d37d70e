#include "ogg.hpp"

namespace unisono {
namespace {

uint32_t checksum(const uint8_t* page, int64_t size) {
    static const auto tables = [] {
        std::vector<uint32_t> values(8 * 256);
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i << 24;
            for (int bit = 0; bit < 8; bit++) value = value << 1 ^ (value & 0x80000000u ? 0x04c11db7u : 0);
            values[i] = value;
        }
        for (size_t k = 1; k < 8; k++)
            for (size_t i = 0; i < 256; i++) {
                const uint32_t before = values[(k - 1) * 256 + i];
                values[k * 256 + i] = before << 8 ^ values[before >> 24];
            }
        return values;
    }();
    const uint32_t* t = tables.data();
    uint32_t sum = 0;
    int64_t i = 0;
    auto byte = [&](int64_t at) -> uint32_t { return at >= 22 && at < 26 ? 0 : page[at]; };
    for (; i < std::min<int64_t>(size, 32); i++) sum = sum << 8 ^ t[(sum >> 24 ^ byte(i)) & 255];
    for (; i + 8 <= size; i += 8) {
        const uint32_t high = sum ^ (static_cast<uint32_t>(page[i]) << 24 | static_cast<uint32_t>(page[i + 1]) << 16 |
                                     static_cast<uint32_t>(page[i + 2]) << 8 | page[i + 3]);
        sum = t[7 * 256 + (high >> 24)] ^ t[6 * 256 + (high >> 16 & 255)] ^ t[5 * 256 + (high >> 8 & 255)] ^
              t[4 * 256 + (high & 255)] ^ t[3 * 256 + page[i + 4]] ^ t[2 * 256 + page[i + 5]] ^ t[256 + page[i + 6]] ^
              t[page[i + 7]];
    }
    for (; i < size; i++) sum = sum << 8 ^ t[(sum >> 24 ^ page[i]) & 255];
    return sum;
}

}  // namespace

Packets::Packets(Bytes bytes) : bytes_(bytes) {
    if (bytes.size < 27) throw BadRecording("is cut off in its first Ogg page");
    const uint32_t serial = little(bytes.data + 14, 4);
    uint32_t due = 0;
    bool begun = false;  // behind the headers, from where on no page may be missing; a broadcast is joined at any
    bool ended = false;
    int64_t last = 0;  // byte behind the last page
    for (int64_t at = 0; at < bytes.size;) {
        const uint8_t* page = bytes.data + at;
        if (!starts(bytes, at, "OggS", 4) || at + 27 > bytes.size || at + 27 + page[26] > bytes.size) {
            if (ended) break;
            throw BadRecording("is damaged or cut off: there is no Ogg page at byte " + std::to_string(at));
        }
        int64_t size = 27 + page[26];
        int32_t ends = 0;
        for (int i = 0; i < page[26]; i++) {
            size += page[27 + i];
            ends += page[27 + i] < 255;
        }
        if (at + size > bytes.size) {
            if (ended) break;
            throw BadRecording("is cut off in its last Ogg page");
        }
        if (little(page + 14, 4) != serial || (at > 0 && (page[5] & 2) != 0)) throw BadRecording("holds several Ogg streams; take it apart");
        const uint32_t number = little(page + 18, 4);
        if (begun && number != due)
            throw BadRecording("is damaged: Ogg page " + std::to_string(number) + " is at byte " + std::to_string(at) +
                               ", where page " + std::to_string(due) + " should be");
        due = number + 1;
        const uint64_t granule = static_cast<uint64_t>(little(page + 10, 4)) << 32 | little(page + 6, 4);
        pages.push_back({at, ends == 0 || granule >= uint64_t{1} << 40 ? -1 : static_cast<int64_t>(granule), ends,
                         (page[5] & 1) != 0});
        begun = begun || granule != 0;
        ended = ended || (page[5] & 4) != 0;
        last = at += size;
    }
    // What follows the stream is not ours, unless it is another one, of which other programs read the first alone.
    const uint8_t* const end = bytes.data + bytes.size;
    for (const uint8_t* next = bytes.data + last;; next++) {
        next = std::search(next, end, "OggS", "OggS" + 4);
        if (end - next < 27) break;
        if (next[4] == 0 && (next[5] & 2) != 0) throw BadRecording("holds several Ogg streams; take it apart");
    }
    if (!ended) throw BadRecording("is cut off: its last Ogg page is not the end of its stream");
}

void Packets::go(size_t page) {
    page_ = page;
    segment_ = 0;
    open_ = false;
    skipping_ = page < pages.size() && pages[page].continued;
}

bool Packets::next(const uint8_t*& data, int64_t& size, size_t& page, bool& last) {
        int64_t length = 0;
        const uint8_t* whole = nullptr;
        joined_.clear();
        while (true) {
            if (!open_) {
                if (page_ >= pages.size()) return false;
                const uint8_t* head = bytes_.data + pages[page_].at;
                int64_t bytes = 27 + head[26];
                for (int i = 0; i < head[26]; i++) bytes += head[27 + i];
                if (checksum(head, bytes) != little(head + 22, 4))
                    throw BadRecording("is damaged: the checksum of its Ogg page at byte " +
                                       std::to_string(pages[page_].at) + " is wrong");
                body_ = head + 27 + head[26];
                segment_ = 0;
                seen_ = 0;
                open_ = true;
            }
            const uint8_t* head = bytes_.data + pages[page_].at;
            const int segments = head[26];
            int64_t part = 0;
            bool end = false;
            while (segment_ < segments && !end) {
                const int lacing = head[27 + segment_++];
                part += lacing;
                end = lacing < 255;
            }
            if (!skipping_) {
                if (end && length == 0) whole = body_;
                else joined_.insert(joined_.end(), body_, body_ + part);
                length += part;
            }
            body_ += part;
            if (end) seen_++;
            const size_t here = page_;
            const bool final = seen_ == pages[page_].ends;
            if (segment_ >= segments) {
                open_ = false;
                page_++;
            }
            if (end && !skipping_) {
                data = whole != nullptr ? whole : joined_.data();
                size = length;
                page = here;
                last = final;
                return true;
            }
            if (end) skipping_ = false;
        }
    }

}  // namespace unisono
