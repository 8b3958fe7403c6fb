//! Who waits is called, in order, and who gives back keeps nothing that somebody waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ctrl::controller::Bell;
use dma::Regions;

use super::{Budget, Purse};

const LARGEST: u32 = 64 << 10;

/// A purse, and how often it was called.
fn purse(budget: &Budget) -> (Purse, Arc<AtomicU32>) {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let bell: Bell = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    (Purse::new(budget, bell).unwrap(), calls)
}

#[test]
fn whoever_is_first_in_line_is_called_when_memory_comes_back() {
    // The block that is kept back, and one more beside the pages of three connections.
    let bytes = u64::from(2 * LARGEST + 3 * (8192 + 4096));
    let budget = Budget::new(&Regions::new(2), bytes, LARGEST, 3, 4096).unwrap();
    let [(mut one, _), (mut two, second), (mut three, third)] = [0; 3].map(|_| purse(&budget));
    let first = one.take(LARGEST).unwrap();
    let kept = one.take(LARGEST).unwrap();
    assert!(two.take(4096).is_none() && three.take(4096).is_none());
    let called = || (second.load(Ordering::Relaxed), third.load(Ordering::Relaxed));
    assert_eq!((budget.waiting(), called()), (2, (0, 0)));
    one.give(first);
    assert_eq!(called(), (1, 0), "nobody but the first");
    assert!(three.take(4096).is_none(), "it is not its turn");
    let small = two.take(4096).unwrap();
    assert_eq!(called(), (1, 1), "now it is");
    let other = three.take(4096).unwrap();
    assert_eq!(budget.waiting(), 0);
    one.give(kept);
    two.give(small);
    three.give(other);
    drop((one, two, three));
    assert_eq!(budget.free_bytes(), budget.bytes());
}

#[test]
fn a_connection_that_goes_while_it_waits_holds_up_nobody() {
    let bytes = u64::from(2 * LARGEST + 3 * (8192 + 4096));
    let budget = Budget::new(&Regions::new(2), bytes, LARGEST, 3, 4096).unwrap();
    let [(mut one, _), (mut two, _), (mut three, third)] = [0; 3].map(|_| purse(&budget));
    let held = [one.take(LARGEST).unwrap(), one.take(LARGEST).unwrap()];
    assert!(two.take(LARGEST).is_none() && three.take(LARGEST).is_none());
    drop(two);
    assert_eq!((budget.waiting(), third.load(Ordering::Relaxed)), (1, 1));
    held.into_iter().for_each(|buffer| one.give(buffer));
    assert!(three.take(LARGEST).is_some());
}
