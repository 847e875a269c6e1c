// torch.ops.oper.sum_gradients and add_gradients: a batch's gradients summed by row, before they
// are sent to the rows' owners (§5); of accesses that were sorted, and of accesses whose rows are
// known. `stream` and `means` are a device's (device/gradients.cpp).

#include "oper/step/sum_gradients.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "cpu/common/parallel.h"
#include "cpu/step/batch_arguments.h"
#include "cpu/step/row_groups.h"
#include "oper/step/add_gradients.h"
#include "schemas.h"

namespace oper {
namespace {

// Accesses that a task has about.
constexpr int64_t kAccessesPerTask = 4 * kAccessesPerPiece;

// Runs [first, last); or accesses [begin, end) of a run that is long, summed to a partial sum.
struct Task {
  int64_t first, last;
  int32_t begin, end;
  int64_t partial;  // -1: none
};

struct LongRun {
  int64_t run;
  int64_t first_partial, pieces;
};

// Work of about equal size, for runs of any length: runs that begin within the same
// kAccessesPerTask accesses, and pieces of those that are longer than that.
struct Tasks {
  std::vector<Task> tasks;
  std::vector<LongRun> long_runs;
  int64_t partials = 0;

  Tasks(const int32_t* run_start, int64_t first, int64_t last) {
    for (int64_t run = first; run < last;) {
      const int64_t bound = run_start[run] + kAccessesPerTask;
      const auto* const next = std::lower_bound(run_start + run, run_start + last, bound);
      int64_t end = next - run_start;
      const bool is_long = run_start[end] - run_start[end - 1] > kAccessesPerTask;
      if (run < end - is_long) tasks.push_back({run, end - is_long, 0, 0, -1});
      if (is_long) add_long(run_start, end - 1);
      run = end;
    }
  }

 private:
  void add_long(const int32_t* run_start, int64_t run) {
    const int64_t first_partial = partials, last = run_start[run + 1];
    for (int64_t begin = run_start[run]; begin < last; begin += kAccessesPerPiece) {
      const int64_t end = std::min(begin + kAccessesPerPiece, last);
      tasks.push_back({0, 0, static_cast<int32_t>(begin), static_cast<int32_t>(end), partials++});
    }
    long_runs.push_back({run, first_partial, partials - first_partial});
  }
};

// Checks that the gradients of a feature's bags are in the gradient.
void check_gradients(const Feature& feature, int64_t f, int64_t bags, int64_t grad_elements) {
  OPER_CHECK_VALUE(bags > 0 && feature.out_stride >= 0 && is_within(feature, bags, grad_elements),
                   "grad: ", grad_elements, " elements, and the ", bags, " bags of feature ", f,
                   " go beyond them");
}

// Checks that the bags of a feature hold its accesses.
template <typename Offset>
void check_bags(const Feature& feature, int64_t f, const Offset* at, int64_t bags, int64_t first,
                int64_t last) {
  OPER_CHECK_VALUE(feature.bags >= 0 && feature.bags <= bags && feature.first_bag >= 0 &&
                       feature.first_bag <= bags - feature.bags,
                   "features: feature ", f, " has no bags ", feature.first_bag, " on of ", bags);
  OPER_CHECK_VALUE(at[feature.first_bag] == first && at[feature.first_bag + feature.bags] == last,
                   "offsets: the bags of feature ", f, " do not hold the accesses ", first, " to ",
                   last);
}

// The gradient of an output, and of the last features, where others' bags have joined the batch,
// one of its own: `from` features are before these.
struct OutputGradient {
  const at::Tensor& own;
  const at::Tensor* clients;
  int64_t from;

  OutputGradient(const at::Tensor& own, const std::optional<at::Tensor>& clients, int64_t from)
      : own(own),
        clients(clients ? &*clients : nullptr),
        from(from) {
    check_contiguous(own, "grad");
    if (!clients) return;
    check_contiguous(*clients, "client_grad");
    check_same_type(*clients, "client_grad", own, "grad");
  }

  const at::Tensor& of(int64_t f) const { return clients && f >= from ? *clients : own; }

  // Of a feature, how many elements of the first gradient lie before the one that it is in.
  int64_t begin(int64_t f) const {
    const auto at = [](const at::Tensor& grad) {
      return reinterpret_cast<intptr_t>(grad.const_data_ptr());
    };
    return (at(of(f)) - at(own)) / static_cast<int64_t>(own.element_size());
  }
};

// The places of gradients of all features, of which those of `bucket` are checked.
GradientPlaces places_of(const Features& features, int64_t bucket, int64_t dim,
                         const OutputGradient& grad, bool bags_hold_one, bool by_bag) {
  GradientPlaces places;
  places.by_bag = by_bag;
  int64_t bags_before = 0;
  for (int64_t f = 0; f < features.count; ++f) {
    const Feature& feature = features[f];
    const int64_t begin = features.begin(f);
    const int64_t first_bag = bags_hold_one ? begin : feature.first_bag;
    OPER_CHECK_VALUE(!by_bag || feature.first_bag == bags_before, "features: the bags of feature ",
                     f, " do not follow those before it");
    bags_before += feature.bags;
    const int64_t end = by_bag ? bags_before : features.end(f);
    const int64_t base = grad.begin(f) + feature.out_base;
    places.segments.push_back(
        {end, base - first_bag * feature.out_stride, feature.out_stride, feature.mean != 0});
    if (feature.bucket != bucket || features.end(f) == begin) continue;
    OPER_CHECK_VALUE(feature.dim == dim, "features: feature ", f, " of bucket ", bucket,
                     " has dim ", feature.dim, ", and dim is ", dim);
    const int64_t bags = bags_hold_one ? features.end(f) - begin : feature.bags;
    check_gradients(feature, f, bags, grad.of(f).numel());
  }
  places.index();
  return places;
}

bool any_mean(const Features& features, int64_t bucket) {
  return std::any_of(features.features, features.features + features.count,
                     [&](const Feature& f) { return f.bucket == bucket && f.mean; });
}

// The bag of every access of a bucket's features, by position.
template <typename Offset>
at::Tensor bags_of_accesses(const Features& features, int64_t bucket, const Offset* at,
                            int64_t bags, int64_t accesses) {
  at::Tensor bag_of = at::empty({accesses}, at::kInt);
  auto* const of = bag_of.mutable_data_ptr<int32_t>();
  for (int64_t f = 0; f < features.count; ++f) {
    const Feature& feature = features[f];
    if (feature.bucket != bucket || features.begin(f) == features.end(f)) continue;
    check_bags(feature, f, at, bags, features.begin(f), features.end(f));
    const int64_t first = feature.first_bag, last = first + feature.bags;
    constexpr int64_t kBagsPerTask = 1 << 14;
    at::parallel_for(first, last, kBagsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t bag = begin; bag < end; ++bag)
        for (int64_t access = at[bag]; access < at[bag + 1]; ++access)
          of[access] = static_cast<int32_t>(bag);
    });
  }
  return bag_of;
}

OPER_SIMD void find(const GradientPlaces& places, const int32_t* positions, int64_t size,
                    int64_t* place) {
  find_gradients(places, positions, size, place);
}

// All that the sums of a call share.
template <typename T>
struct Summation {
  const GradientPlaces& places;
  const T* grad;
  const float* weights;
  bool factors;
  const int32_t* positions;
  const int32_t* run_start;
  int64_t first, last;  // runs
  int64_t dim;
  float scale;
  float* out;  // of run `first` on

  void run() const {
    const Tasks shared(run_start, first, last);
    std::vector<float> partial(shared.partials * dim);
    share_out(shared.tasks.size(), [&](const auto& next) {
      Buffer buffer(2 * kAccessesPerTask);
      for (int64_t t = next(); t >= 0; t = next()) {
        const Task& task = shared.tasks[t];
        if (task.partial < 0) {
          sum(buffer, run_start + task.first, task.last - task.first, scale,
              out + (task.first - first) * dim);
        } else {
          const int32_t piece[] = {task.begin, task.end};
          sum(buffer, piece, 1, 1.0f, partial.data() + task.partial * dim);
        }
      }
    });
    add_pieces(shared, partial.data());
  }

 private:
  struct Buffer {
    std::vector<int64_t> place;
    std::vector<float> factor;
    explicit Buffer(int64_t accesses) : place(accesses + kMostAhead), factor(accesses) {}
  };

  void sum(Buffer& buffer, const int32_t* starts, int64_t runs, float scale, float* out) const {
    const int64_t accesses = starts[runs] - starts[0];
    const int32_t* const at = positions + starts[0];
    find(places, at, accesses, buffer.place.data());
    std::fill_n(buffer.place.data() + accesses, kMostAhead, buffer.place[0]);
    if (factors) find_factors(places, weights, at, accesses, buffer.factor.data());
    const float* const factor = factors ? buffer.factor.data() : nullptr;
    sum_runs(RunSums<T>{grad, buffer.place.data(), factor, starts, runs, dim, scale, out});
  }

  // The sums of pieces, added up in their order, however many they are.
  void add_pieces(const Tasks& shared, const float* partial) const {
    share_out(shared.long_runs.size(), [&](const auto& next) {
      for (int64_t n = next(); n >= 0; n = next()) {
        const LongRun& run = shared.long_runs[n];
        float* const sum = out + (run.run - first) * dim;
        std::fill_n(sum, dim, 0.0f);
        const float* added = partial + run.first_partial * dim;
        for (int64_t piece = 0; piece < run.pieces; ++piece, added += dim)
          for (int64_t d = 0; d < dim; ++d) sum[d] += added[d];
        for (int64_t d = 0; d < dim; ++d) sum[d] *= scale;
      }
    });
  }
};

// f(T{}) with the gradient's type.
template <typename F>
void with_gradient_type(const at::Tensor& grad, const F& f) {
  switch (grad.scalar_type()) {
    case at::kFloat: return f(float{});
    case at::kHalf: return f(Half{});
    case at::kBFloat16: return f(BFloat{});
    default:
      OPER_CHECK_TYPE(false, "grad: expected dtype float32, float16 or bfloat16, got ",
                      grad.scalar_type());
  }
}

void sum_gradients(const at::Tensor& grad, const at::Tensor& positions, const at::Tensor& run_start,
                   const at::Tensor& groups, int64_t bucket, int64_t first_group,
                   int64_t last_group, const std::optional<at::Tensor>& offsets,
                   const std::optional<at::Tensor>& weights, const at::Tensor& features,
                   const at::Tensor& segment_offset, int64_t dim, double scale, at::Tensor& values,
                   bool by_bag, int64_t /*stream*/, bool /*means*/,
                   const std::optional<at::Tensor>& client_grad, int64_t own_features) {
  const int32_t* const at = elements<int32_t>(positions, "positions");
  const int32_t* const start = elements_at_least<int32_t>(run_start, 1, "run_start");
  const Features view = features_of(features, segment_offset);
  const int64_t accesses = view.accesses();
  check_size(dim, 1, kMostRows, "dim");
  const RowGroup runs =
      row_group(groups, first_group, last_group, dim, run_start.numel() - 1, values.numel());
  check_size(accesses, 0, std::numeric_limits<int32_t>::max(), "segment_offset: accesses");
  OPER_CHECK_VALUE(start[runs.begin] >= 0 && start[runs.end] <= positions.numel(),
                   "run_start: goes from ", start[runs.begin], " to ", start[runs.end],
                   ", and there are ", positions.numel(), " positions");
  float* const out = writable_elements<float>(values, 0, "values") + runs.value;
  const OutputGradient grads(grad, client_grad, own_features);
  const float* const weight = weights ? elements<float>(*weights, accesses, "weights") : nullptr;
  if (runs.rows() == 0) return;

  OPER_CHECK_VALUE(start[runs.begin] < start[runs.end], "run_start: runs without accesses");
  OPER_CHECK_VALUE(!by_bag || (offsets && !weight),
                   "by_bag: with offsets and without weights alone");
  GradientPlaces places = places_of(view, bucket, dim, grads, !offsets, by_bag);
  at::Tensor bags;
  if (offsets) {
    with_bag_offsets(*offsets, accesses, [&](const auto* begins) {
      if (!by_bag) bags = bags_of_accesses(view, bucket, begins, offsets->numel() - 1, accesses);
      if constexpr (std::is_same_v<decltype(begins), const int32_t*>)
        places.offsets32 = begins;
      else
        places.offsets64 = begins;
    });
    if (!by_bag) places.bag_of = bags.const_data_ptr<int32_t>();
  }
  const bool factors = weight || (offsets && any_mean(view, bucket));
  with_gradient_type(grad, [&](auto type) {
    using T = decltype(type);
    Summation<T>{places,     static_cast<const T*>(grad.const_data_ptr()),
                 weight,     factors,
                 at,         start,
                 runs.begin, runs.end,
                 dim,        static_cast<float>(scale),
                 out}
        .run();
  });
}

// The accesses of features of a bucket, added to their rows one after the other.
template <typename T, typename Offset>
void add_features(const Features& view, int64_t bucket, const OutputGradient& grad,
                  const Offset* begins, int64_t bags, const float* weights, const int32_t* row,
                  int64_t first_row, RowSums& sums) {
  for (int64_t f = 0; f < view.count; ++f) {
    const Feature& feature = view[f];
    const int64_t first = view.begin(f), last = view.end(f);
    if (feature.bucket != bucket || !feature.has_gradient || first == last) continue;
    const auto* const values = static_cast<const T*>(grad.of(f).const_data_ptr());
    FeatureGradients<T, Offset> of{values + feature.out_base,
                                   feature.out_stride,
                                   last - first,
                                   nullptr,
                                   first,
                                   last,
                                   false,
                                   weights,
                                   row,
                                   static_cast<int32_t>(first_row)};
    if (begins) {
      check_bags(feature, f, begins, bags, first, last);
      of.bags = feature.bags;
      of.begins = begins + feature.first_bag;
      of.mean = feature.mean != 0;
    }
    check_gradients(feature, f, of.bags, grad.of(f).numel());
    sums.add(of);
  }
}

void add_gradients(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& groups,
                   int64_t bucket, int64_t first_group, int64_t last_group,
                   const std::optional<at::Tensor>& offsets,
                   const std::optional<at::Tensor>& weights, const at::Tensor& features,
                   const at::Tensor& segment_offset, int64_t dim, double scale, at::Tensor& values,
                   const std::optional<at::Tensor>& client_grad, int64_t own_features) {
  const Features view = features_of(features, segment_offset);
  const int64_t accesses = view.accesses();
  const int32_t* const row = elements<int32_t>(rows, accesses, "rows");
  check_size(dim, 1, kMostRows, "dim");
  const RowGroup of = row_group(groups, first_group, last_group, dim, kMostRows, values.numel());
  float* const to = writable_elements<float>(values, 0, "values") + of.value;
  if (of.rows() == 0) return;
  const OutputGradient grads(grad, client_grad, own_features);
  const float* const weight = weights ? elements<float>(*weights, accesses, "weights") : nullptr;
  for (int64_t f = 0; f < view.count; ++f)
    OPER_CHECK_VALUE(view[f].bucket != bucket || view[f].dim == dim, "features: feature ", f,
                     " of bucket ", bucket, " has dim ", view[f].dim, ", and dim is ", dim);
  RowSums sums(to, of.rows(), dim);
  with_gradient_type(grad, [&](auto type) {
    using T = decltype(type);
    const auto add = [&](const auto* begins, int64_t bags) {
      add_features<T>(view, bucket, grads, begins, bags, weight, row, of.begin, sums);
    };
    if (!offsets) return add(static_cast<const int64_t*>(nullptr), 0);
    with_bag_offsets(*offsets, accesses,
                     [&](const auto* begins) { add(begins, offsets->numel() - 1); });
  });
  sums.finish(static_cast<float>(scale));
}

void add_gradients_shape(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                         int64_t, const std::optional<at::Tensor>&,
                         const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                         int64_t, double, at::Tensor&, const std::optional<at::Tensor>&, int64_t) {}

void sum_gradients_shape(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         int64_t, int64_t, int64_t, const std::optional<at::Tensor>&,
                         const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                         int64_t, double, at::Tensor&, bool, int64_t, bool,
                         const std::optional<at::Tensor>&, int64_t) {}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kSumGradients);
  m.def(
      "add_gradients(Tensor grad, Tensor rows, Tensor groups, int bucket, int first_group,"
      " int last_group, Tensor? offsets, Tensor? weights, Tensor features, Tensor segment_offset,"
      " int dim, float scale, Tensor(a!) values, Tensor? client_grad=None, int own_features=0)"
      " -> ()");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("sum_gradients", sum_gradients);
  m.impl("add_gradients", add_gradients);
}

TORCH_LIBRARY_IMPL(oper, Meta, m) {
  m.impl("sum_gradients", sum_gradients_shape);
  m.impl("add_gradients", add_gradients_shape);
}

}  // namespace oper
