// Ogg Vorbis, after the Vorbis I specification (xiph.org/vorbis/doc/Vorbis_I_spec.html) and RFC 3533.
//
// Written here, for stb_vorbis writes where it should not on damaged headers and libvorbis takes twice the time: packets
// are decoded one after another up to their spectra, mixed to mono there, and the inverse MDCTs of several packets are
// made together, one in each SIMD lane. Floor 0, which no encoder has used since 2002, is refused.
#include <cmath>
#include <cstdlib>

#include "ogg.hpp"
#include "vorbis_setup.hpp"

namespace unisono {
namespace {

using namespace vorbis;

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
            silent[c] = unused[c] = !read_floor(bits, *setup_, setup_->floors[submap.first], points_.data() + 80 * c);
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
            apply_floor(setup_->floors[submap.first], points_.data() + 80 * c, own, m);
            if (!any && channels == 1) std::copy_n(own, m, row);
            else if (!any) for (int k = 0; k < m; k++) row[k] = own[k] * share;
            else for (int k = 0; k < m; k++) row[k] += own[k] * share;
            any = true;
        }
        if (!any) std::fill_n(row, m, 0.0f);
        return mode.large;
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
