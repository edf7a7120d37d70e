// The Python module `unisono_audio._native`: pipelines over recordings, and the kernels by themselves.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "pipeline.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace unisono;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

template <class T, class A>
std::vector<T> copy(const A& array) {
    return std::vector<T>(array.data(), array.data() + array.size());
}

nb::ndarray<nb::numpy, float> numpy(std::vector<float>&& values, std::initializer_list<size_t> shape) {
    auto* kept = new std::vector<float>(std::move(values));
    nb::capsule owner(kept, [](void* at) noexcept { delete static_cast<std::vector<float>*>(at); });
    return nb::ndarray<nb::numpy, float>(kept->data(), shape, owner);
}

// Buffers of Python objects, held while native threads read them.
struct Held {
    std::vector<Py_buffer> buffers;
    ~Held() {
        for (auto& buffer : buffers) PyBuffer_Release(&buffer);
    }
    const Py_buffer& take(nb::handle object) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
        buffers.push_back(buffer);
        return buffers.back();
    }
};

// Outputs of a period, their first sample and their taps -> blocks of eight that share a stretch of input.
std::shared_ptr<ResampleTable> table_of(int64_t from, int64_t to, int64_t left, Ints first, Floats taps) {
    auto table = std::make_shared<ResampleTable>();
    const int64_t phases = static_cast<int64_t>(first.size()), each = phases ? static_cast<int64_t>(taps.size()) / phases : 0;
    if (phases != to || each * phases != static_cast<int64_t>(taps.size())) throw nb::value_error("not a table");
    int64_t times = 1;
    while (to * times % ResampleTable::kBlock != 0) times++;
    table->from = from * times;
    table->to = to * times;
    table->left = left;
    int64_t furthest = 0;
    for (int64_t block = 0; block < table->to; block += ResampleTable::kBlock) {
        auto begin = [&](int64_t p) { return first.data()[p % to] + p / to * from; };
        int64_t low = begin(block), high = low;
        for (int i = 0; i < ResampleTable::kBlock; i++) {
            low = std::min<int64_t>(low, begin(block + i));
            high = std::max<int64_t>(high, begin(block + i) + each);
        }
        table->first.push_back(static_cast<int32_t>(low));
        table->taps.push_back(static_cast<int32_t>(high - low));
        table->offset.push_back(static_cast<int64_t>(table->values.size()));
        table->values.resize(table->values.size() + static_cast<size_t>((high - low) * ResampleTable::kBlock), 0.0f);
        float* to_fill = table->values.data() + table->offset.back();
        for (int i = 0; i < ResampleTable::kBlock; i++) {
            const int64_t p = block + i;
            for (int64_t tap = 0; tap < each; tap++)
                to_fill[(begin(p) - low + tap) * ResampleTable::kBlock + i] = taps.data()[p % to * each + tap];
        }
        furthest = std::max(furthest, high - left);
    }
    table->right = furthest + table->from;  // a last block may reach beyond the last output
    return table;
}

nb::list run(const Pipeline& pipeline, nb::list sources, Doubles windows, nb::object out, int threads) {
    const size_t count = nb::len(sources);
    if (windows.shape(0) != count || windows.shape(1) != 3) throw nb::value_error("windows is not (sources, 3)");
    Held held;
    held.buffers.reserve(count);
    std::vector<Item> items(count);
    for (size_t i = 0; i < count; i++) {
        nb::handle source = sources[i];
        Item& item = items[i];
        const double* window = windows.data() + 3 * i;
        item.window = {window[0], window[1], window[2]};
        if (nb::isinstance<nb::str>(source)) {
            item.path = nb::cast<std::string>(source);
        } else if (nb::isinstance<nb::tuple>(source)) {  // (samples, rate)
            nb::tuple pair = nb::borrow<nb::tuple>(source);
            const Py_buffer& buffer = held.take(pair[0]);
            item.samples = static_cast<const float*>(buffer.buf);
            item.count = buffer.len / static_cast<int64_t>(sizeof(float));
            item.rate = nb::cast<int>(pair[1]);
        } else {
            const Py_buffer& buffer = held.take(source);
            item.bytes = {static_cast<const uint8_t*>(buffer.buf), buffer.len};
            if (item.bytes.data == nullptr) item.bytes.data = reinterpret_cast<const uint8_t*>("");
        }
    }
    float* target = nullptr;
    int64_t rows = 0;
    Out array;
    if (!out.is_none()) {
        array = nb::cast<Out>(out);
        if (array.ndim() < 2 || array.shape(0) != count) throw nb::value_error("out has not a row for each source");
        rows = static_cast<int64_t>(array.shape(1));
        const int64_t width = array.ndim() == 3 ? static_cast<int64_t>(array.shape(2)) : 1;
        if (width != pipeline.width()) throw nb::value_error("out has not the features' width");
        target = array.data();
    }
    std::vector<Result> results;
    {
        nb::gil_scoped_release released;
        results = pipeline.run(items, target, rows, threads);
    }
    nb::list answers;
    for (auto& result : results) {
        nb::object values = nb::none();
        if (target == nullptr && result.kind == Result::kGood) {
            const auto width = static_cast<size_t>(pipeline.width());
            const size_t length = result.values.size() / width;
            values = pipeline.featured ? nb::cast(numpy(std::move(result.values), {length, width}))
                                       : nb::cast(numpy(std::move(result.values), {length}));
        }
        answers.append(nb::make_tuple(static_cast<int>(result.kind), result.text, result.rate, result.start,
                                      result.length, values));
    }
    return answers;
}

void* address(nb::dict from, const char* name) {
    return from.contains(name) ? reinterpret_cast<void*>(nb::cast<uintptr_t>(from[name])) : nullptr;
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const auto* each : all_kernels()) names.push_back(each->name);
        return names;
    });

    nb::class_<Codecs>(m, "Codecs")
        .def("__init__",
             [](Codecs* self, nb::dict from) {
                 new (self) Codecs();
#define UNISONO_TAKE(name) self->name = address(from, #name)
                 UNISONO_TAKE(flac_open);
                 UNISONO_TAKE(flac_read);
                 UNISONO_TAKE(flac_seek);
                 UNISONO_TAKE(flac_close);
                 UNISONO_TAKE(snd_open);
                 UNISONO_TAKE(snd_read);
                 UNISONO_TAKE(snd_seek);
                 UNISONO_TAKE(snd_close);
                 UNISONO_TAKE(snd_error);
             })
        .def("probe", [](const Codecs& self, nb::handle source) {
            Held held;
            held.buffers.reserve(1);
            const Py_buffer& buffer = held.take(source);
            Bytes bytes{static_cast<const uint8_t*>(buffer.buf), buffer.len};
            Header header;
            std::string format, bad;
            {
                nb::gil_scoped_release released;
                try {
                    header = probe(self, bytes);
                } catch (const NeedsFFmpeg& error) {
                    format = error.what();
                } catch (const BadRecording& error) {
                    bad = error.what();
                }
            }
            return nb::make_tuple(bad, format, header.format, header.rate, header.channels, header.frames);
        });

    nb::class_<FeaturePlan>(m, "FeaturePlan")
        .def("__init__",
             [](FeaturePlan* self, int window, int hop, int size, bool remove_mean, float emphasis, bool power, float floor,
                float scale, Floats shape, Ints band_first, Ints band_count, Floats band_values, Floats cosines) {
                 new (self) FeaturePlan();
                 self->window = window;
                 self->hop = hop;
                 self->size = size;
                 self->remove_mean = remove_mean;
                 self->emphasis = emphasis;
                 self->power = power;
                 self->floor = floor;
                 self->scale = scale;
                 self->shape = copy<float>(shape);
                 self->band_first = copy<int32_t>(band_first);
                 self->band_count = copy<int32_t>(band_count);
                 self->band_values = copy<float>(band_values);
                 self->cosines = copy<float>(cosines);
                 self->bands = static_cast<int>(band_first.size());
                 self->outputs = self->cosines.empty() ? self->bands : static_cast<int>(cosines.size()) / self->bands;
                 if (window > size || !plan_fft(*self)) throw nb::value_error("no FFT of this size");
             },
             "window"_a, "hop"_a, "size"_a, "remove_mean"_a, "emphasis"_a, "power"_a, "floor"_a, "scale"_a, "shape"_a,
             "band_first"_a, "band_count"_a, "band_values"_a, "cosines"_a);

    nb::class_<Pipeline>(m, "Pipeline")
        .def("__init__",
             [](Pipeline* self, const Codecs& codecs, int rate, double duration, const FeaturePlan* plan, bool centred,
                bool drop_last, float range, bool pad_minimum, float pad_value, float mean, float deviation,
                const std::string& instruction_set) {
                 new (self) Pipeline();
                 self->codecs = codecs;
                 self->rate = rate;
                 self->duration = duration;
                 self->featured = plan != nullptr;
                 if (plan != nullptr) self->plan = *plan;
                 self->centred = centred;
                 self->drop_last = drop_last;
                 self->range = range;
                 self->pad_minimum = pad_minimum;
                 self->pad_value = pad_value;
                 self->mean = mean;
                 self->deviation = deviation;
                 for (const auto* each : all_kernels())
                     if (self->kernels == nullptr && (instruction_set.empty() || instruction_set == each->name))
                         self->kernels = each;
                 if (self->kernels == nullptr) throw nb::value_error("this CPU has not that instruction set");
             },
             "codecs"_a, "rate"_a, "duration"_a, "plan"_a.none(), "centred"_a, "drop_last"_a, "range"_a, "pad_minimum"_a,
             "pad_value"_a, "mean"_a, "deviation"_a, "instruction_set"_a)
        .def("add_table",
             [](Pipeline& self, int rate, int64_t from, int64_t to, int64_t left, Ints first, Floats taps) {
                 self.add(rate, table_of(from, to, left, first, taps));
             })
        .def("run", run, "sources"_a, "windows"_a, "out"_a.none(), "threads"_a);
}
