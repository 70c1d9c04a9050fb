#include "deep_ep/tensor.hpp"

#include <gtest/gtest.h>

#include <string>

#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

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
