// Ogg Vorbis, after the Vorbis I specification (xiph.org/vorbis/doc/Vorbis_I_spec.html) and RFC 3533.
//
// Written here, for stb_vorbis writes where it should not on damaged headers and libvorbis takes twice the time: packets
// are decoded one after another up to their spectra, mixed to mono there, and the inverse MDCTs of several packets are
// made together, one in each SIMD lane. Floor 0, which no encoder has used since 2002, is refused.
#include <cmath>
#include <cstdlib>

#include "kernels.hpp"
#include "stream.hpp"

namespace unisono {
namespace {

constexpr int64_t kMostValues = int64_t{1} << 21;  // floats of all codebooks' vectors together
constexpr int64_t kMostEntries = int64_t{1} << 20; // of all codebooks
constexpr int kFast = 10;                          // bits of a code that one look-up resolves

[[noreturn]] void damaged(const char* what) {
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

int bits_of(uint32_t value) { return value == 0 ? 0 : 32 - __builtin_clz(value); }

uint32_t reversed(uint32_t value) {
    value = (value >> 1 & 0x55555555u) | (value & 0x55555555u) << 1;
    value = (value >> 2 & 0x33333333u) | (value & 0x33333333u) << 2;
    value = (value >> 4 & 0x0f0f0f0fu) | (value & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(value);
}

float unpacked(uint32_t bits) {  // section 9.2.2
    const double mantissa = bits & 0x1fffff;
    const double value = std::ldexp(mantissa, static_cast<int>(bits >> 21 & 0x3ff) - 788);
    return static_cast<float>(bits & 0x80000000u ? -value : value);
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

// Codes in the order of their entries: each takes the first free one of its length (section 3.2.1).
void give_codes(Codebook& book, const std::vector<uint8_t>& lengths) {
    uint32_t free[33] = {};
    bool any = false;
    book.fast.assign(size_t{1} << kFast, 0);
    for (int entry = 0; entry < book.entries; entry++) {
        const int length = lengths[static_cast<size_t>(entry)];
        if (length == 0) continue;
        uint32_t code = 0;
        int from = length;
        if (!any) {
            from = 0;
            any = true;
        } else {
            while (from > 0 && free[from] == 0) from--;
            if (from == 0) damaged("a codebook has more codes than there are");
            code = free[from];
            free[from] = 0;
        }
        for (int each = length; each > from; each--) free[each] = code + (uint32_t{1} << (32 - each));
        const uint32_t what = static_cast<uint32_t>(length) << 24 | static_cast<uint32_t>(entry);
        if (length <= kFast) {
            for (uint32_t low = reversed(code); low < 1u << kFast; low += 1u << length) book.fast[low] = what;
        } else {
            book.codes.emplace_back(code, what);
        }
    }
    std::sort(book.codes.begin(), book.codes.end());
}

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

const float* decibels() {  // section 10.1: 256 steps of equal ratio up to 1
    static const std::vector<float> table = [] {
        std::vector<float> values(256);
        for (int i = 0; i < 256; i++)
            values[static_cast<size_t>(i)] = static_cast<float>(std::pow(1.0649863e-07, (255 - i) / 255.0));
        return values;
    }();
    return table.data();
}

Codebook codebook(Bits& bits, int64_t& entries, int64_t& values) {
    Codebook book;
    if (bits.read(24) != 0x564342) damaged("a codebook does not begin as one");
    book.dimensions = static_cast<int>(bits.read(16));
    book.entries = static_cast<int>(bits.read(24));
    if (book.dimensions == 0 || book.entries == 0) damaged("a codebook is empty");
    if ((entries += book.entries) > kMostEntries) damaged("its codebooks have too many entries");
    std::vector<uint8_t> lengths(static_cast<size_t>(book.entries));
    if (bits.read(1)) {  // ordered
        int length = static_cast<int>(bits.read(5)) + 1;
        for (int entry = 0; entry < book.entries; length++) {
            const int count = static_cast<int>(bits.read(bits_of(static_cast<uint32_t>(book.entries - entry))));
            if (count > book.entries - entry || length > 32 || bits.ended()) damaged("a codebook's lengths make no sense");
            std::fill_n(lengths.begin() + entry, count, static_cast<uint8_t>(length));
            entry += count;
        }
    } else {
        const bool sparse = bits.read(1) != 0;
        for (auto& length : lengths) {
            length = sparse && !bits.read(1) ? 0 : static_cast<uint8_t>(bits.read(5) + 1);
            if (bits.ended()) damaged("its headers are cut off");
        }
    }
    give_codes(book, lengths);
    const int lookup = static_cast<int>(bits.read(4));
    if (lookup == 0) return book;
    if (lookup > 2) damaged("a codebook has vectors of an unknown kind");
    const float least = unpacked(bits.read(32)), step = unpacked(bits.read(32));
    const int width = static_cast<int>(bits.read(4)) + 1;
    const bool sums = bits.read(1) != 0;
    int64_t count = static_cast<int64_t>(book.entries) * book.dimensions;
    if ((values += count) > kMostValues) damaged("its codebooks have too many values");
    if (lookup == 1) {  // the largest number whose power of `dimensions` is no more than the entries
        auto fits = [&](int64_t root) {
            int64_t power = 1;
            for (int i = 0; i < book.dimensions; i++)
                if ((power *= root) > book.entries) return false;
            return true;
        };
        count = 1;
        while (fits(count + 1)) count++;
    }
    if (count * width > bits.left()) damaged("its headers are cut off");
    std::vector<float> numbers(static_cast<size_t>(count));
    for (auto& number : numbers) number = static_cast<float>(bits.read(width));
    book.values.resize(static_cast<size_t>(book.entries) * static_cast<size_t>(book.dimensions));
    float* to = book.values.data();
    for (int64_t entry = 0; entry < book.entries; entry++) {
        float last = 0.0f;
        int64_t divisor = 1;
        for (int i = 0; i < book.dimensions; i++) {
            const int64_t place = lookup == 1 ? entry / divisor % count : entry * book.dimensions + i;
            if (lookup == 1 && divisor <= book.entries) divisor *= count;
            *to = numbers[static_cast<size_t>(place)] * step + least + last;
            if (!std::isfinite(*to)) damaged("a codebook's vectors are not finite");
            if (sums) last = *to;
            to++;
        }
    }
    return book;
}

Floor floor_of(Bits& bits, size_t books) {
    Floor floor;
    const uint32_t type = bits.read(16);
    if (type == 0) throw BadRecording("is an Ogg Vorbis of an encoder before 2002 (floor 0), which is not read");
    if (type != 1) damaged("a floor is of an unknown kind");
    floor.partitions.resize(bits.read(5));
    int classes = 0;
    for (auto& each : floor.partitions) {
        each = static_cast<uint8_t>(bits.read(4));
        classes = std::max(classes, each + 1);
    }
    for (int c = 0; c < classes; c++) {
        floor.dimensions[c] = static_cast<uint8_t>(bits.read(3) + 1);
        floor.subclasses[c] = static_cast<uint8_t>(bits.read(2));
        floor.master[c] = floor.subclasses[c] ? static_cast<uint8_t>(bits.read(8)) : 0;
        if (floor.master[c] >= books) damaged("a floor asks for a codebook that does not exist");
        for (int i = 0; i < 1 << floor.subclasses[c]; i++) {
            floor.books[c][i] = static_cast<int16_t>(static_cast<int>(bits.read(8)) - 1);
            if (floor.books[c][i] >= static_cast<int>(books)) damaged("a floor asks for a codebook that does not exist");
        }
    }
    floor.multiplier = static_cast<int>(bits.read(2)) + 1;
    const int range = static_cast<int>(bits.read(4));
    floor.x[0] = 0;
    floor.x[1] = static_cast<uint16_t>(1u << range);
    for (const uint8_t c : floor.partitions)
        for (int i = 0; i < floor.dimensions[c]; i++) {
            if (floor.count >= 65) damaged("a floor has too many points");
            floor.x[floor.count++] = static_cast<uint16_t>(bits.read(range));
        }
    for (int i = 0; i < floor.count; i++) floor.order[i] = static_cast<uint8_t>(i);
    std::sort(floor.order, floor.order + floor.count, [&](int a, int b) { return floor.x[a] < floor.x[b]; });
    for (int i = 1; i < floor.count; i++)
        if (floor.x[floor.order[i]] == floor.x[floor.order[i - 1]]) damaged("a floor has a point twice");
    for (int i = 2; i < floor.count; i++) {
        int low = 0, high = 1;
        for (int j = 0; j < i; j++) {
            if (floor.x[j] < floor.x[i] && floor.x[j] > floor.x[low]) low = j;
            if (floor.x[j] > floor.x[i] && floor.x[j] < floor.x[high]) high = j;
        }
        floor.low[i] = static_cast<uint8_t>(low);
        floor.high[i] = static_cast<uint8_t>(high);
    }
    return floor;
}

Residue residue_of(Bits& bits, const std::vector<Codebook>& books) {
    Residue residue;
    residue.type = static_cast<int>(bits.read(16));
    if (residue.type > 2) damaged("a residue is of an unknown kind");
    residue.begin = static_cast<int>(bits.read(24));
    residue.end = static_cast<int>(bits.read(24));
    residue.partition = static_cast<int>(bits.read(24)) + 1;
    residue.classes = static_cast<int>(bits.read(6)) + 1;
    residue.book = static_cast<int>(bits.read(8));
    if (residue.book >= static_cast<int>(books.size())) damaged("a residue asks for a codebook that does not exist");
    std::vector<uint32_t> cascade(static_cast<size_t>(residue.classes));
    for (auto& each : cascade) {
        each = bits.read(3);
        if (bits.read(1)) each |= bits.read(5) << 3;
    }
    for (const uint32_t each : cascade)
        for (int pass = 0; pass < 8; pass++) {
            int book = -1;
            if (each >> pass & 1) {
                book = static_cast<int>(bits.read(8));
                if (book >= static_cast<int>(books.size()) || books[static_cast<size_t>(book)].values.empty())
                    damaged("a residue asks for a codebook that does not exist");
            }
            residue.books.push_back(static_cast<int16_t>(book));
        }
    return residue;
}

Mapping mapping_of(Bits& bits, int channels, size_t floors, size_t residues) {
    Mapping mapping;
    if (bits.read(16) != 0) damaged("a mapping is of an unknown kind");
    const int submaps = bits.read(1) ? static_cast<int>(bits.read(4)) + 1 : 1;
    if (bits.read(1)) {
        const int width = bits_of(static_cast<uint32_t>(channels - 1));
        const int steps = static_cast<int>(bits.read(8)) + 1;
        for (int i = 0; i < steps; i++) {
            const uint32_t magnitude = bits.read(width), angle = bits.read(width);
            if (magnitude == angle || magnitude >= static_cast<uint32_t>(channels) ||
                angle >= static_cast<uint32_t>(channels))
                damaged("a mapping couples channels that do not exist");
            mapping.coupling.emplace_back(magnitude, angle);
        }
    }
    if (bits.read(2) != 0) damaged("a mapping has bits that nobody knows");
    mapping.submap.assign(static_cast<size_t>(channels), 0);
    if (submaps > 1)
        for (auto& each : mapping.submap)
            if ((each = static_cast<uint8_t>(bits.read(4))) >= submaps) damaged("a mapping has a channel nowhere");
    for (int i = 0; i < submaps; i++) {
        bits.read(8);
        const uint32_t floor = bits.read(8), residue = bits.read(8);
        if (floor >= floors || residue >= residues) damaged("a mapping asks for what does not exist");
        mapping.submaps.emplace_back(floor, residue);
    }
    return mapping;
}

std::shared_ptr<const Setup> setup_of(const std::vector<uint8_t>& first, const std::vector<uint8_t>& third) {
    auto setup = std::make_shared<Setup>();
    setup->headers = first;
    setup->headers.insert(setup->headers.end(), third.begin(), third.end());
    setup->channels = first[11];
    setup->rate = static_cast<int>(std::min<uint32_t>(little(&first[12], 4), 0x7fffffff));
    setup->block[0] = 1 << (first[28] & 15);
    setup->block[1] = 1 << (first[28] >> 4);
    if (setup->block[0] < 64 || setup->block[1] > 8192 || setup->block[0] > setup->block[1])
        damaged("its blocks have sizes that make no sense");
    Bits bits(third.data() + 7, static_cast<int64_t>(third.size()) - 7);
    int64_t entries = 0, values = 0;
    setup->books.resize(bits.read(8) + 1);
    for (auto& book : setup->books) book = codebook(bits, entries, values);
    for (int times = static_cast<int>(bits.read(6)) + 1; times > 0; times--) bits.read(16);
    for (int count = static_cast<int>(bits.read(6)) + 1; count > 0; count--)
        setup->floors.push_back(floor_of(bits, setup->books.size()));
    for (int count = static_cast<int>(bits.read(6)) + 1; count > 0; count--)
        setup->residues.push_back(residue_of(bits, setup->books));
    for (int count = static_cast<int>(bits.read(6)) + 1; count > 0; count--)
        setup->mappings.push_back(mapping_of(bits, setup->channels, setup->floors.size(), setup->residues.size()));
    for (int count = static_cast<int>(bits.read(6)) + 1; count > 0; count--) {
        Mode mode;
        mode.large = bits.read(1) != 0;
        if (bits.read(16) != 0 || bits.read(16) != 0) damaged("a mode is of an unknown kind");
        mode.mapping = static_cast<int>(bits.read(8));
        if (mode.mapping >= static_cast<int>(setup->mappings.size())) damaged("a mode asks for what does not exist");
        setup->modes.push_back(mode);
    }
    if (!bits.read(1) || bits.ended()) damaged("its headers are cut off");
    for (int size = 0; size < 2; size++) {
        const int half = setup->block[size] / 2;
        setup->mdct[size].make(half);
        constexpr double quarter = 1.57079632679489661923;
        for (int i = 0; i < half; i++) {
            const double inner = std::sin(quarter * (i + 0.5) / half);
            setup->slope[size].push_back(static_cast<float>(std::sin(quarter * inner * inner)));
        }
    }
    return setup;
}

// Pages and packets of one logical stream ------------------------------------------------------------------------------

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

struct Page {
    int64_t at;
    int64_t granule;  // samples up to its end; -1 where no packet ends in it
    int32_t ends;     // packets that end in it
    bool continued;
};

class Packets {
public:
    explicit Packets(Bytes bytes) : bytes_(bytes) {
        const uint32_t serial = little(bytes.data + 14, 4);
        bool ended = false;
        for (int64_t at = 0; at < bytes.size;) {
            const uint8_t* page = bytes.data + at;
            if (!starts(bytes, at, "OggS", 4) || at + 27 > bytes.size || at + 27 + page[26] > bytes.size) {
                if (ended) break;  // what follows the stream is not ours
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
            if (little(page + 14, 4) != serial) throw BadRecording("holds several Ogg streams; take it apart");
            const uint64_t granule = static_cast<uint64_t>(little(page + 10, 4)) << 32 | little(page + 6, 4);
            pages.push_back({at, ends == 0 || granule >= uint64_t{1} << 40 ? -1 : static_cast<int64_t>(granule), ends,
                             (page[5] & 1) != 0});
            ended = ended || (page[5] & 4) != 0;
            at += size;
        }
        if (!ended) throw BadRecording("is cut off: its last Ogg page is not the end of its stream");
    }

    // Go to the first packet that begins in a page.
    void go(size_t page) {
        page_ = page;
        segment_ = 0;
        open_ = false;
        skipping_ = page < pages.size() && pages[page].continued;
    }
    // The next packet; false after the last one. `page` is the one it ends in, `last` whether no other ends there.
    bool next(const uint8_t*& data, int64_t& size, size_t& page, bool& last) {
        int64_t length = 0;
        const uint8_t* whole = nullptr;
        joined_.clear();
        while (true) {
            if (!open_) {
                if (page_ >= pages.size()) return false;
                const uint8_t* head = bytes_.data + pages[page_].at;
                int64_t bytes = 27 + head[26];
                for (int i = 0; i < head[26]; i++) bytes += head[27 + i];
#ifndef UNISONO_FUZZ  // mutated packets are to be decoded
                if (checksum(head, bytes) != little(head + 22, 4))
                    throw BadRecording("is damaged: the checksum of its Ogg page at byte " +
                                       std::to_string(pages[page_].at) + " is wrong");
#endif
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

    std::vector<Page> pages;

private:
    Bytes bytes_;
    size_t page_ = 0;
    int segment_ = 0;
    int32_t seen_ = 0;
    bool open_ = false, skipping_ = false;
    const uint8_t* body_ = nullptr;
    std::vector<uint8_t> joined_;
};

// The decoder ---------------------------------------------------------------------------------------------------------

class Vorbis final : public Stream {
public:
    Vorbis(Bytes bytes, Room& room) : packets_(bytes) {
        mixed = true;
        const uint8_t* data = nullptr;
        int64_t size = 0;
        size_t page = 0;
        bool last = false;
        std::vector<uint8_t> headers[3];
        packets_.go(0);
        for (int i = 0; i < 3; i++) {
            if (!packets_.next(data, size, page, last)) damaged("its headers are cut off");
            if (size < 7 || data[0] != 2 * i + 1 || std::memcmp(data + 1, "vorbis", 6) != 0)
                damaged("its headers are damaged");
            if (i != 1) headers[i].assign(data, data + size);
        }
        if (headers[0].size() < 30 || little(&headers[0][7], 4) != 0) damaged("its first header makes no sense");
        header.format = "vorbis";
        header.channels = headers[0][11];
        header.rate = static_cast<int>(std::min<uint32_t>(little(&headers[0][12], 4), 0x7fffffff));
        check(header);
        for (const auto& each : room.setups) {
            const auto& known = static_cast<const Setup*>(each.get())->headers;
            if (known.size() == headers[0].size() + headers[2].size() &&
                std::equal(headers[0].begin(), headers[0].end(), known.begin()) &&
                std::equal(headers[2].begin(), headers[2].end(),
                           known.begin() + static_cast<int64_t>(headers[0].size())))
                setup_ = std::static_pointer_cast<const Setup>(each);
        }
        if (!setup_) {
            setup_ = setup_of(headers[0], headers[2]);
            if (room.setups.size() >= 4) room.setups.erase(room.setups.begin());
            room.setups.push_back(setup_);
        }
        kernels_ = room.kernels != nullptr ? room.kernels : &unisono::kernels();
        first_ = last ? page + 1 : page;
        measure();
        const int half = setup_->block[1] / 2;
        const auto channels = static_cast<size_t>(header.channels);
        spectra_.resize(channels * static_cast<size_t>(half));
        points_.resize(channels * 80);
        const int lanes = kernels_->lanes;
        rows_.resize(static_cast<size_t>(lanes * half));
        scratch_.resize(static_cast<size_t>(3 * half * lanes + 32));
        before_.resize(static_cast<size_t>(half));
        restart();
    }

    void seek(int64_t frame) override {
        // The last page up to which no more than `frame` samples come: its last packet and those that follow give them.
        size_t page = first_;
        for (size_t i = first_; i < packets_.pages.size(); i++)
            if (packets_.pages[i].granule >= 0) {
                if (packets_.pages[i].granule - base_ > frame) break;
                page = i;
            }
        const int64_t reached = packets_.pages[page].granule - base_;
        if (page == first_ || reached <= 0 || reached > frame) {
            restart();
        } else {
            size_t from = page;  // where that packet begins
            while (from > first_ && packets_.pages[from].ends - (packets_.pages[from].continued ? 1 : 0) < 1) from--;
            packets_.go(from);
            const uint8_t* data;
            int64_t size;
            size_t at;
            bool last;
            do {
                if (!packets_.next(data, size, at, last)) cannot_seek(frame);
            } while (at < page || !last);
            prime_ = -1;
            ready_.clear();
            taken_ = 0;
            done_ = false;
            queue(data, size);
            flush();
            ready_.clear();
            position_ = reached;
        }
        float thrown[4096];
        while (position_ < frame) {
            const int64_t got = read(thrown, std::min<int64_t>(4096, frame - position_));
            if (got <= 0) cannot_seek(frame);
        }
    }

    int64_t read(float* to, int64_t frames) override {
        int64_t count = 0;
        frames = std::min(frames, header.frames - position_);
        while (count < frames) {
            if (taken_ == ready_.size()) {
                ready_.clear();
                taken_ = 0;
                while (!done_ && ready_.empty()) fill();
                if (ready_.empty()) break;
            }
            const int64_t now = std::min<int64_t>(frames - count, static_cast<int64_t>(ready_.size() - taken_));
            std::copy_n(ready_.begin() + static_cast<int64_t>(taken_), now, to + count);
            taken_ += static_cast<size_t>(now);
            count += now;
            position_ += now;
        }
        return count;
    }

private:
    // Samples that come before the first page's last packet, and so where counting begins.
    void measure() {
        const uint8_t* data;
        int64_t size;
        size_t page;
        bool last;
        packets_.go(first_);
        int64_t samples = 0;
        int before = -1;
        while (packets_.next(data, size, page, last)) {
            const int block = block_of(data, size);
            if (block >= 0) {
                if (before >= 0) samples += (setup_->block[before] + setup_->block[block]) / 4;
                before = block;
            }
            if (last && packets_.pages[page].granule >= 0) {
                base_ = packets_.pages[page].granule - samples;
                bool more = false;
                for (size_t i = page + 1; i < packets_.pages.size(); i++) more = more || packets_.pages[i].ends > 0;
                if (!more) base_ = 0;  // an only page says how much of its end is meant
                break;
            }
        }
        int64_t end = 0;
        for (size_t i = first_; i < packets_.pages.size(); i++) end = std::max(end, packets_.pages[i].granule);
        trim_ = base_ < 0 ? -base_ : 0;  // samples before the first one that is meant
        if (base_ < 0) base_ = 0;
        header.frames = std::max<int64_t>(0, end - base_);
    }

    int block_of(const uint8_t* data, int64_t size) const {
        if (size == 0 || data[0] & 1) return -1;
        Bits bits(data, size);
        bits.read(1);
        const uint32_t mode = bits.read(bits_of(static_cast<uint32_t>(setup_->modes.size() - 1)));
        return mode < setup_->modes.size() ? static_cast<int>(setup_->modes[mode].large) : -1;
    }

    void restart() {
        packets_.go(first_);
        prime_ = -1;
        ready_.clear();
        taken_ = 0;
        done_ = false;
        position_ = 0;
        int64_t left = trim_;
        float thrown[1024];
        const int64_t all = header.frames;
        header.frames += trim_;
        while (left > 0) {
            const int64_t got = read(thrown, std::min<int64_t>(1024, left));
            if (got <= 0) break;
            left -= got;
        }
        header.frames = all;
        position_ = 0;
    }

    // Decode packets until the lanes are full, and make their samples.
    void fill() {
        const uint8_t* data;
        int64_t size;
        size_t page;
        bool last;
        while (static_cast<int>(queued_.size()) < kernels_->lanes) {
            if (!packets_.next(data, size, page, last)) {
                done_ = true;
                break;
            }
            queue(data, size);
        }
        flush();
    }

    void queue(const uint8_t* data, int64_t size) {
        if (size == 0) return;  // a packet without content is left out
        const int half = setup_->block[1] / 2;
        float* row = rows_.data() + static_cast<int64_t>(queued_.size()) * half;
        const int block = spectrum(data, size, row);
        if (block >= 0) queued_.push_back(block);
    }

    void flush() {
        const int half = setup_->block[1] / 2;
        auto* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch_.data()) + 63) & ~uintptr_t{63});
        for (int size = 0; size < 2; size++) {
            float* rows[64];
            int count = 0;
            for (size_t i = 0; i < queued_.size(); i++)
                if (queued_[i] == size) rows[count++] = rows_.data() + static_cast<int64_t>(i) * half;
            if (count) kernels_->mdct(setup_->mdct[size], rows, count, scratch);
        }
        for (size_t i = 0; i < queued_.size(); i++) overlap(rows_.data() + static_cast<int64_t>(i) * half, queued_[i]);
        queued_.clear();
    }

    // Add what the window lets through of a block to what it let through of the one before. With D the DCT-IV of the
    // M spectral values, the left half of the inverse MDCT is D[M/2..M) and then -D[M-1..M/2], the right half
    // -D[M/2-1..0] and then -D[0..M/2).
    void overlap(const float* d, int block) {
        const int m = setup_->block[block] / 2;
        if (prime_ >= 0) {
            const int before = setup_->block[prime_] / 2;
            const int slope = std::min(m, before), count = before / 2 + m / 2;
            const size_t at = ready_.size();
            ready_.resize(at + static_cast<size_t>(count));
            float* out = ready_.data() + at;
            const float* rise = setup_->slope[slope == setup_->block[0] / 2 ? 0 : 1].data();
            const float* old = before_.data();
            // t counts from the middle of the block before; of it t is -D[before/2-1-t] up to before/2, then -D[t-before/2]
            const int flat = before / 2 - slope / 2;
            for (int t = 0; t < flat; t++) out[t] = -old[before / 2 - 1 - t];
            for (int i = 0; i < slope; i++) {
                const int t = flat + i, mine = t - before / 2 + m / 2;
                const float last = t < before / 2 ? -old[before / 2 - 1 - t] : -old[t - before / 2];
                const float now = mine < m / 2 ? d[mine + m / 2] : -d[m + m / 2 - 1 - mine];
                out[t] = last * rise[slope - 1 - i] + now * rise[i];
            }
            for (int t = flat + slope; t < count; t++) out[t] = -d[m + m / 2 - 1 - (t - before / 2 + m / 2)];
        }
        std::copy_n(d, m, before_.begin());
        prime_ = block;
    }

    // A packet's spectrum, mixed to mono; its block size, or -1 for one that is not audio.
    int spectrum(const uint8_t* data, int64_t size, float* row) {
        Bits bits(data, size);
        if (bits.read(1)) return -1;
        const uint32_t number = bits.read(bits_of(static_cast<uint32_t>(setup_->modes.size() - 1)));
        if (number >= setup_->modes.size()) damaged("a packet has a mode that does not exist");
        const Mode& mode = setup_->modes[number];
        const Mapping& mapping = setup_->mappings[static_cast<size_t>(mode.mapping)];
        const int m = setup_->block[mode.large] / 2, channels = header.channels;
        if (mode.large) bits.read(2);  // the shapes of its neighbours, which are known
        bool silent[kMostChannels], unused[kMostChannels];
        for (int c = 0; c < channels; c++) {
            const auto& submap = mapping.submaps[mapping.submap[static_cast<size_t>(c)]];
            silent[c] = unused[c] = !curve(bits, setup_->floors[submap.first], c);
        }
        for (const auto& [magnitude, angle] : mapping.coupling)
            if (!silent[magnitude] || !silent[angle]) silent[magnitude] = silent[angle] = false;
        std::fill_n(spectra_.begin(), static_cast<int64_t>(channels) * m, 0.0f);
        for (size_t s = 0; s < mapping.submaps.size(); s++) {
            float* vectors[kMostChannels];
            bool skipped[kMostChannels];
            int count = 0;
            for (int c = 0; c < channels; c++)
                if (mapping.submap[static_cast<size_t>(c)] == s) {
                    vectors[count] = spectra_.data() + static_cast<int64_t>(c) * m;
                    skipped[count++] = silent[c];
                }
            if (count) fill_residue(bits, setup_->residues[mapping.submaps[s].second], vectors, skipped, count, m);
        }
        for (size_t i = mapping.coupling.size(); i-- > 0;) {
            float* magnitude = spectra_.data() + static_cast<int64_t>(mapping.coupling[i].first) * m;
            float* angle = spectra_.data() + static_cast<int64_t>(mapping.coupling[i].second) * m;
            for (int k = 0; k < m; k++) {  // section 4.3.5
                const float a = magnitude[k], b = angle[k];
                const float first = a > 0 ? (b > 0 ? a : a + b) : (b > 0 ? a : a - b);
                const float second = a > 0 ? (b > 0 ? a - b : a) : (b > 0 ? a + b : a);
                magnitude[k] = first;
                angle[k] = second;
            }
        }
        const float share = 1.0f / static_cast<float>(channels);
        bool any = false;
        for (int c = 0; c < channels; c++) {
            if (unused[c]) continue;
            float* own = spectra_.data() + static_cast<int64_t>(c) * m;
            const auto& submap = mapping.submaps[mapping.submap[static_cast<size_t>(c)]];
            draw(setup_->floors[submap.first], points_.data() + 80 * c, own, m);
            if (!any && channels == 1) std::copy_n(own, m, row);
            else if (!any) for (int k = 0; k < m; k++) row[k] = own[k] * share;
            else for (int k = 0; k < m; k++) row[k] += own[k] * share;
            any = true;
        }
        if (!any) std::fill_n(row, m, 0.0f);
        return mode.large;
    }

    // The points of a channel's floor (section 7.2.3), negative where one is not drawn; false for a channel without.
    bool curve(Bits& bits, const Floor& floor, int channel) {
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
                const int entry = setup_->books[floor.master[c]].decode(bits);
                if (entry < 0) return false;
                value = static_cast<uint32_t>(entry);
            }
            for (int i = 0; i < floor.dimensions[c]; i++) {
                const int book = floor.books[c][value & ((1u << floor.subclasses[c]) - 1)];
                value >>= floor.subclasses[c];
                y[at] = book < 0 ? 0 : setup_->books[static_cast<size_t>(book)].decode(bits);
                if (y[at] < 0) return false;
                at++;
            }
        }
        if (bits.ended()) return false;
        int32_t* points = points_.data() + 80 * channel;
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
    static void draw(const Floor& floor, const int32_t* points, float* own, int m) {
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

    // The residue of some channels (section 8.6); where a packet ends early, what it had is kept.
    void fill_residue(Bits& bits, const Residue& residue, float* const* vectors, const bool* skipped, int count, int m) {
        float* joint = nullptr;
        float* const* const channels = vectors;
        bool none[1] = {false};
        const int joined = count;
        if (residue.type == 2) {
            none[0] = true;
            for (int c = 0; c < count; c++) none[0] = none[0] && skipped[c];
            if (none[0]) return;
            if (count > 1) {
                if (joint_.size() < static_cast<size_t>(count) * static_cast<size_t>(m))
                    joint_.resize(static_cast<size_t>(count) * static_cast<size_t>(m));
                joint = joint_.data();
                std::fill_n(joint, static_cast<int64_t>(count) * m, 0.0f);
                vectors = &joint;
            }
            skipped = none;
            m *= count;
            count = 1;
        }
        const int begin = std::min(residue.begin, m), end = std::min(residue.end, m);
        const int parts = end > begin ? (end - begin) / residue.partition : 0;
        const Codebook& classes = setup_->books[static_cast<size_t>(residue.book)];
        if (class_.size() < static_cast<size_t>(count) * static_cast<size_t>(parts + classes.dimensions))
            class_.resize(static_cast<size_t>(count) * static_cast<size_t>(parts + classes.dimensions));
        const int stride = parts + classes.dimensions;
        bool over = false;
        for (int pass = 0; pass < 8 && !over; pass++)
            for (int part = 0; part < parts && !over;) {
                if (pass == 0)
                    for (int c = 0; c < count && !over; c++) {
                        if (skipped[c]) continue;
                        int entry = classes.decode(bits);
                        if (entry < 0 || bits.ended()) {
                            over = true;
                            break;
                        }
                        for (int i = classes.dimensions - 1; i >= 0; i--) {
                            class_[static_cast<size_t>(c * stride + part + i)] = static_cast<uint8_t>(entry % residue.classes);
                            entry /= residue.classes;
                        }
                    }
                for (int i = 0; i < classes.dimensions && part < parts && !over; i++, part++)
                    for (int c = 0; c < count && !over; c++) {
                        if (skipped[c]) continue;
                        const int book = residue.books[static_cast<size_t>(
                            8 * class_[static_cast<size_t>(c * stride + part)] + pass)];
                        if (book < 0) continue;
                        float* to = vectors[c] + begin + static_cast<int64_t>(part) * residue.partition;
                        over = !add(bits, setup_->books[static_cast<size_t>(book)], residue, to);
                    }
            }
        if (joint != nullptr) {
            const int each = m / joined;
            for (int c = 0; c < joined; c++)
                for (int k = 0; k < each; k++) channels[c][k] = joint[k * joined + c];
        }
    }

    // Vectors of a codebook, added to a partition; false where the packet ends.
    static bool add(Bits& bits, const Codebook& book, const Residue& residue, float* to) {
        const int size = residue.partition, dims = book.dimensions;
        if (residue.type == 0) {
            const int step = size / dims;
            for (int i = 0; i < step; i++) {
                const int entry = book.decode(bits);
                if (entry < 0 || bits.ended()) return false;
                const float* values = book.values.data() + static_cast<int64_t>(entry) * dims;
                for (int k = 0; k < dims; k++) to[i + k * step] += values[k];
            }
            return true;
        }
        for (int i = 0; i < size;) {
            const int entry = book.decode(bits);
            if (entry < 0 || bits.ended()) return false;
            const float* values = book.values.data() + static_cast<int64_t>(entry) * dims;
            const int now = std::min(dims, size - i);
            for (int k = 0; k < now; k++) to[i + k] += values[k];
            i += now;
        }
        return true;
    }

    Packets packets_;
    std::shared_ptr<const Setup> setup_;
    const Kernels* kernels_ = nullptr;
    size_t first_ = 0;                 // page in which the first audio packet ends, or the one after the headers
    int64_t base_ = 0, trim_ = 0, position_ = 0;
    std::vector<float> spectra_, rows_, scratch_, before_, ready_, joint_;
    std::vector<int32_t> points_;
    std::vector<uint8_t> class_;
    std::vector<int> queued_;          // block sizes of the rows that wait
    int prime_ = -1;                   // block size of the packet before
    size_t taken_ = 0;
    bool done_ = false;
};

}  // namespace

std::unique_ptr<Stream> open_vorbis(Bytes bytes, Room& room) { return std::make_unique<Vorbis>(bytes, room); }

}  // namespace unisono
