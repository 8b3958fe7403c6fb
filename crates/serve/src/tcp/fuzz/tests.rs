//! The fuzzer finds nothing in the current code, and finds each reintroduced bug.

use std::panic::catch_unwind;

use tenmil_base::Random;

use super::{fuzz_nvme_tcp_target, seed_scripts};
use crate::tcp::injected_bug::{InjectedBug, with_injected_bug};

/// Number of scripts tried for each reintroduced bug.
const SEEDS: u64 = 60;

/// Random script: a seed with some bytes near its end changed, and random bytes appended.
fn random_script(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut draw = |bound: u64| usize::try_from(random.below(bound)).unwrap();
    let seeds = seed_scripts();
    let mut bytes = seeds[draw(seeds.len() as u64)].1.clone();
    for _ in 0..draw(6) {
        let at = 18 + draw(bytes.len() as u64 - 18);
        bytes[at] = draw(256).to_le_bytes()[0];
    }
    let more = draw(200);
    bytes.extend((0..more).map(|_| draw(256).to_le_bytes()[0]));
    bytes
}

#[test]
fn random_scripts_violate_no_invariant() {
    seed_scripts().iter().for_each(|(_, bytes)| fuzz_nvme_tcp_target(bytes));
    (0..SEEDS / 3).map(random_script).for_each(|bytes| fuzz_nvme_tcp_target(&bytes));
}

/// Number of random scripts tried before a reintroduced bug is detected.
fn scripts_until_bug_found(injected_bug: InjectedBug) -> Option<u64> {
    (0..SEEDS).find(|seed| {
        let bytes = random_script(*seed);
        catch_unwind(|| with_injected_bug(injected_bug, || fuzz_nvme_tcp_target(&bytes))).is_err()
    })
}

#[test]
fn every_injected_bug_is_found() {
    for injected_bug in InjectedBug::ALL {
        let seed = scripts_until_bug_found(injected_bug);
        assert!(seed.is_some(), "{injected_bug:?} is not found");
    }
}
