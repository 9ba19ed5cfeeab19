// Attention against an oracle, and bit for bit against itself: rows alone, in blocks, next to poison.
// Usage: test_attend [random configurations] [seed]. Compiled once for every instruction set.
#include "../../../kernels/csrc/attend.h"

#include "attend_case.h"
#include "check.h"

static void print_config(const Config& c) {
  fprintf(stderr, "  d %d page %d rows %d context %d split %d window %d cap %g int8 %d causal %d\n", c.head_dim,
          c.page_size, c.num_rows, c.context, c.split, c.window, c.soft_cap, c.kind == KvKind::int8, c.is_causal);
}

static void check_row(const Request& r, const Result& result, int row) {
  Oracle oracle(r, row);
  if (oracle.sum == 0) {
    CHECK(result.max[row] == -INFINITY && result.sum[row] == 0, "row %d sees nothing", row);
    for (int d = 0; d < r.config.head_dim; d++) {
      const float zero = 0;
      CHECK(memcmp(&result.out[row * r.config.head_dim + d], &zero, 4) == 0, "row %d, d %d of nothing", row, d);
    }
    return;
  }
  CHECK(fabs(result.max[row] - oracle.max) < 1e-4 * (1 + fabs(oracle.max)), "row %d: max %g, not %g", row,
        result.max[row], oracle.max);
  double rounding = 1.0 / 256;  // each weight to bf16: 2^-9, and their sum as much
  CHECK(fabs(result.sum[row] - oracle.sum) < (rounding / 2 + 1e-4) * oracle.sum, "row %d: sum %g, not %g", row,
        result.sum[row], oracle.sum);
  for (int d = 0; d < r.config.head_dim; d++) {
    double y = result.out[row * r.config.head_dim + d] / result.sum[row], expected = oracle.out[d] / oracle.sum;
    double tolerance = (rounding + 2e-4) * oracle.magnitude[d] / oracle.sum + 1e-6;
    CHECK(fabs(y - expected) < tolerance, "row %d, d %d: %g, not %g", row, d, y, expected);
  }
}

// The rows alone, with everything poisoned that none of them sees, must not differ in a bit.
static void check_subset(const Request& r, const Result& whole, const std::vector<int>& rows, std::mt19937& random,
                         void* scratch) {
  int first = r.config.context, last = 0;
  for (int row : rows) {
    first = std::min(first, r.first[row]);
    last = std::max(last, r.last[row]);
  }
  Pages pages(r, first, last, random);
  Result part = run(r, pages, rows, pointsman::attend, scratch);
  for (size_t i = 0; i < rows.size(); i++)
    CHECK(part.is_same((int)i, whole, rows[i]), "row %d in a block of %zu differs", rows[i], rows.size());
}

static void check_config(const Config& c, std::mt19937& random, void* scratch) {
  int failures = check_failures();
  Request r = create_request(c, random);
  Pages pages(r, 0, c.context, random);
  std::vector<int> rows;
  for (int row = 0; row < c.num_rows; row++) rows.push_back(row);
  memset(scratch, 0xff, pointsman::kAttendScratchBytes);  // NaN everywhere
  Result whole = run(r, pages, rows, pointsman::attend, scratch);
  for (int row = 0; row < c.num_rows; row += 1 + c.num_rows / 8) check_row(r, whole, row);
  for (int row = 0; row < c.num_rows; row += 1 + c.num_rows / 8) check_subset(r, whole, {row}, random, scratch);
  std::shuffle(rows.begin(), rows.end(), random);
  rows.resize(1 + random() % rows.size());
  check_subset(r, whole, rows, random, scratch);
  if (check_failures() > failures) print_config(c);
}

static Config create_config(std::mt19937& random) {
  Config c;
  c.head_dim = 32 * (1 + random() % 8);
  c.page_size = 32 << random() % 3;
  c.num_rows = random() % 2 ? 1 + random() % 8 : 1 + random() % 64;
  c.context = random() % 4 ? 1 + random() % 200 : 1 + random() % 1200;
  c.split = random() % (c.context / kSplit + 1);
  c.window = random() % 3 ? 0 : 1 + random() % 300;
  c.soft_cap = random() % 4 ? 0 : 5.0f;
  c.kind = random() % 3 ? KvKind::bf16 : KvKind::int8;
  c.is_causal = random() % 2;
  return c;
}

// Shapes of models: group 3 with 64, group 2 with 128, group 8 with 256; a context that ends a split.
static void check_models(std::mt19937& random, void* scratch) {
  for (KvKind kind : {KvKind::bf16, KvKind::int8})
    for (int context : {1, 31, 32, 33, 256, 511, 512, 513, 1024}) {
      int split = (context - 1) / kSplit;
      check_config({64, 32, 3, context, split, 0, 0, kind, false}, random, scratch);
      check_config({128, 64, 2, context, split, 0, 0, kind, false}, random, scratch);
      check_config({256, 128, 8, context, split, 100, 50, kind, false}, random, scratch);
      check_config({64, 64, 63, context, split, 0, 0, kind, true}, random, scratch);
    }
}

// A NaN among the keys that a row sees is not to be lost as a small weight.
static void check_nan_shows(std::mt19937& random, void* scratch) {
  Config c = {64, 32, 3, 100, 0, 0, 0, KvKind::bf16, false};
  Request r = create_request(c, random);
  r.last[0] = 50;
  r.k[60 * c.head_dim + 5] = NAN;
  Pages pages(r, 0, c.context, random);
  Result result = run(r, pages, {0, 1, 2}, pointsman::attend, scratch);
  CHECK(!std::isnan(result.sum[0]), "a row that does not see the NaN");
  CHECK(std::isnan(result.sum[1]) && std::isnan(result.out[c.head_dim]), "a row that sees the NaN: %g", result.sum[1]);
}

// A product that underflows to -0, then -0: alone the sum stays -0, and weights of zero behind it make it 0.
static void check_negative_zero(std::mt19937& random, void* scratch) {
  Config c = {32, 32, 2, 40, 0, 0, 0, KvKind::bf16, false};
  Request r = create_request(c, random);
  r.last[0] = 2;
  for (int d = 0; d < c.head_dim; d++) {
    r.q[d] = to_bits(1);
    r.k[d] = -10, r.k[c.head_dim + d] = 10;  // the first weight is e^-87
    r.v[d] = -1.2e-38f, r.v[c.head_dim + d] = -0.0f;
    for (int position = 2; position < c.context; position++) r.v[position * c.head_dim + d] = 1;
  }
  Pages pages(r, 0, c.context, random);
  check_subset(r, run(r, pages, {0, 1}, pointsman::attend, scratch), {0}, random, scratch);
}

int main(int argc, char** argv) {
  int configs = argc > 1 ? atoi(argv[1]) : 200;
  std::mt19937 random(argc > 2 ? atoi(argv[2]) : 1);
  Aligned scratch(pointsman::kAttendScratchBytes);
  check_models(random, scratch.data);
  check_nan_shows(random, scratch.data);
  check_negative_zero(random, scratch.data);
  for (int i = 0; i < configs; i++) check_config(create_config(random), random, scratch.data);
  printf("%d configurations, %d failures\n", configs, check_failures());
  return check_failures() != 0;
}
