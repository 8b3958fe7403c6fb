//! What a thick, written volume costs over its device, in nanoseconds per read of 4 KiB.
//!
//! `cargo bench -p tenmil-drivers --bench overhead`
//!
//! The device is memory, so that nothing else is slow. The two alternate, and are compared within a
//! round; what is printed is the median of all rounds, the smallest and the largest.

mod reads;

use reads::{ReadLoad, ram_device, volume_on_ram};
use tenmil_linux::Clock;

const ROUNDS: usize = 15;
/// Reads of one side in a round.
const READS: u64 = 400_000;

fn main() {
    println!("{:>5} {:>22} {:>22} {:>22}", "depth", "device, ns", "volume, ns", "volume more, ns");
    for depth in [1, 128] {
        let (mut device, mut volume) = (ram_device(depth), volume_on_ram(depth));
        let rounds = || [ns_per_read(&mut device, depth), ns_per_read(&mut volume, depth)];
        let rounds: Vec<[f64; 2]> = std::iter::repeat_with(rounds).take(ROUNDS).collect();
        let column = |of: fn(&[f64; 2]) -> f64| median_and_range(rounds.iter().map(of).collect());
        let columns = [column(|both| both[0]), column(|both| both[1]), column(|[a, b]| b - a)];
        println!("{depth:>5} {:>22} {:>22} {:>22}", columns[0], columns[1], columns[2]);
    }
}

/// Nanoseconds for each of many reads.
fn ns_per_read(reads: &mut ReadLoad, depth: u64) -> f64 {
    let clock = Clock::start();
    let begun = clock.now();
    (0..READS / depth).for_each(|_| reads.run_iteration());
    clock.now().since(begun).ns as f64 / READS as f64
}

/// Median, smallest and largest.
fn median_and_range(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let [first, .., last] = values[..] else { return String::new() };
    format!("{:.1} ({first:.1}–{last:.1})", values[values.len() / 2])
}
