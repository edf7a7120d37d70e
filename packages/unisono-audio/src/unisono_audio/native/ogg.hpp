// Pages and packets of one logical stream of Ogg (RFC 3533).
#pragma once

#include <cstdint>
#include <vector>

#include "stream.hpp"

namespace unisono {

struct Page {
    int64_t at;
    int64_t granule;  // samples up to its end; -1 where no packet ends in it
    int32_t ends;     // packets that end in it
    bool continued;
};

class Packets {
public:
    // Find all pages; refuse what is cut off, or holds several streams.
    explicit Packets(Bytes bytes);

    // Go to the first packet that begins in a page.
    void go(size_t page);
    // The next packet; false after the last one. `page` is the one it ends in, `last` whether no other ends there.
    bool next(const uint8_t*& data, int64_t& size, size_t& page, bool& last);

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

}  // namespace unisono
