//! Two ways to draw a random LBA: the remainder of a division, and the high half of a product.

use core::hint::black_box;

use tenmil_base::Random;

/// Draws `count` slots out of `places` with a division each. Returns their sum, so that no draw is
/// optimized away.
#[inline(never)]
pub fn sum_of_draws_by_division(random: &mut Random, places: u64, count: u64) -> u64 {
    // Prevents the compiler from replacing the division by a constant.
    let places = black_box(places);
    (0..count).fold(0_u64, |sum, _| sum.wrapping_add(random.next_u64() % places))
}

/// Draws `count` slots out of `places` with a multiplication each.
#[inline(never)]
pub fn sum_of_draws_by_multiplication(random: &mut Random, places: u64, count: u64) -> u64 {
    let places = black_box(places);
    (0..count).fold(0_u64, |sum, _| sum.wrapping_add(random.below(places)))
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{sum_of_draws_by_division, sum_of_draws_by_multiplication};

    #[test]
    fn both_methods_draw_equally_many_lbas_from_the_whole_device() {
        let mean = |draw: fn(&mut Random, u64, u64) -> u64| draw(&mut Random::new(1), 1001, 10_000);
        for sum in [mean(sum_of_draws_by_division), mean(sum_of_draws_by_multiplication)] {
            assert!((4_900_000..5_100_000).contains(&sum), "{sum}, expected about 500 each");
        }
        assert_eq!(
            (
                sum_of_draws_by_division(&mut Random::new(1), 7, 0),
                sum_of_draws_by_multiplication(&mut Random::new(1), 1, 9)
            ),
            (0, 0)
        );
    }
}
