// Says which part of a row slice does not match the checksums that the row itself carries (include/row_check.h).
#pragma once
#include <string>

#include "../include/row.h"

namespace moet {

// Empty if good, else which part is bad: "extras", "w13 tile 3", "w2 tile 0".
std::string verify_slice(const RowGeometry& geometry, const RowSlice& slice, const RowView& view);

}  // namespace moet
