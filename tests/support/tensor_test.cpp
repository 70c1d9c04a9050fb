#include "deep_ep/tensor.hpp"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

static_assert(!std::is_constructible_v<TensorView, ConstTensorView>, "memory that is only read stays so");

TEST(TensorView, BracesAroundAViewKeepItsMemory) {
  struct Arguments {
    ConstTensorView x = {};
  };
  int memory = 0;
  const TensorView view = TensorView::contiguous(&memory, DType::int32, {1});
  for (const ConstTensorView& read : {ConstTensorView{view}, ConstTensorView(view), Arguments{.x = {view}}.x}) {
    EXPECT_EQ(read.data, &memory);
    EXPECT_EQ(read.describe(), "int32[1]");
  }
  EXPECT_EQ(ConstTensorView{}.data, nullptr);
}

TEST(TensorView, StridesOfSizeOneDimensionsDoNotMatter) {
  TensorView view = TensorView::contiguous(nullptr, DType::float32, {4, 1, 8});
  view.strides[1] = 12345;
  EXPECT_TRUE(view.is_contiguous());
  view.strides[0] = 16;
  EXPECT_FALSE(view.is_contiguous());
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

TEST(TensorView, RefusesTooManyDimensionsAndNegativeSizes) {
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {1, 1, 1, 1, 1}), InvalidArgument);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::int32, {2, -1}), InvalidArgument);
}

}  // namespace
}  // namespace deep_ep
