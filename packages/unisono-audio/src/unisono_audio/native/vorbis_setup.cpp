#include "vorbis_setup.hpp"

#include <cmath>

#include "stream.hpp"

namespace unisono::vorbis {
namespace {

constexpr int64_t kMostValues = int64_t{1} << 21;  // floats of all codebooks' vectors together
constexpr int64_t kMostEntries = int64_t{1} << 20; // of all codebooks

float unpacked(uint32_t bits) {  // section 9.2.2
    const double mantissa = bits & 0x1fffff;
    const double value = std::ldexp(mantissa, static_cast<int>(bits >> 21 & 0x3ff) - 788);
    return static_cast<float>(bits & 0x80000000u ? -value : value);
}

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

}  // namespace

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

}  // namespace unisono::vorbis
