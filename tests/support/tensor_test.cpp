#include "deep_ep/tensor.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <type_traits>

#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

TEST(TensorView, EmptyTensorKeepsTheStrideOfItsRows) {
  const TensorView view = TensorView::contiguous(nullptr, DType::bfloat16, {0, 7168});
  EXPECT_EQ(view.elements(), 0);
  EXPECT_EQ(view.stride(0), 7168);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::int32, {4, 0, 3}).stride(0), 3);
}

TEST(TensorView, StridesOfSizeOneDimensionsDoNotMatter) {
  TensorView view = TensorView::contiguous(nullptr, DType::float32, {4, 1, 8});
  view.strides[1] = 12345;
  EXPECT_TRUE(view.is_contiguous());
  view.strides[0] = 16;
  EXPECT_FALSE(view.is_contiguous());
}

TEST(TensorView, ManyElementsDoNotOverflow) {
  const TensorView view = TensorView::contiguous(nullptr, DType::int64, {1 << 20, 1 << 14});
  EXPECT_EQ(view.elements(), std::int64_t{1} << 34);
  EXPECT_EQ(view.bytes(), std::size_t{1} << 37);
}

TEST(TensorView, Describe) {
  TensorView view = TensorView::contiguous(nullptr, DType::bfloat16, {4096, 7168});
  EXPECT_EQ(view.describe(), "bfloat16[4096, 7168]");
  view.strides = {1, 4096};
  EXPECT_EQ(view.describe(), "bfloat16[4096, 7168] with strides [1, 4096]");
}

TEST(TensorView, SizesWhoseProductWouldWrapAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 32;
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {kHuge, kHuge}), InvalidArgument);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {0, kHuge, kHuge}), InvalidArgument);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int64, {std::int64_t{1} << 61}), InvalidArgument);
  TensorView view = TensorView::contiguous(nullptr, DType::int32, {1, 1});
  view.shape = {kHuge, kHuge};
  EXPECT_THROW(view.elements(), InvalidArgument);
  EXPECT_FALSE(view.is_contiguous());
  EXPECT_EQ(view.describe(), "int32[4294967296, 4294967296]");
}

TEST(TensorView, NumbersOfDimensionsThatCannotBeAreNotFollowed) {
  TensorView view = TensorView::contiguous(nullptr, DType::int32, {2, 3});
  for (const int dims : {-1, 5, 1 << 30}) {
    view.dims = dims;
    EXPECT_THROW(view.elements(), InvalidArgument);
    EXPECT_FALSE(view.is_contiguous());
    EXPECT_EQ(view.describe(), "int32 of " + std::to_string(dims) + " dimensions");
  }
}

TEST(TensorView, RefusesTooManyDimensionsAndNegativeSizes) {
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {1, 1, 1, 1, 1}), InvalidArgument);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {2, -1}), InvalidArgument);
}

class CountingStorage final : public Tensor::Storage {
 public:
  explicit CountingStorage(int& recorded, int& destroyed) : recorded_(recorded), destroyed_(destroyed) {}
  ~CountingStorage() override { ++destroyed_; }
  void record_stream(StreamHandle) override { ++recorded_; }

 private:
  int& recorded_;
  int& destroyed_;
};

TEST(Tensor, CopiesShareTheMemoryAndTheLastOneGivesItBack) {
  int recorded = 0;
  int destroyed = 0;
  Tensor first(TensorView::contiguous(nullptr, DType::int32, {2}),
               std::make_shared<CountingStorage>(recorded, destroyed));
  {
    const Tensor second = first;
    second.record_stream(nullptr);
    first = Tensor();
    EXPECT_FALSE(first.defined());
    EXPECT_EQ(destroyed, 0);
  }
  EXPECT_EQ(recorded, 1);
  EXPECT_EQ(destroyed, 1);
}

}  // namespace
}  // namespace deep_ep
