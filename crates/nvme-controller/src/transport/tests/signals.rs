//! Signaled vectors and their timing.

use tenmil_base::Span;
use tenmil_wire::admin::SetFeatures;
use tenmil_wire::{Status, TypedCommand};

use super::rig::{Rig, SHARED, read};

#[test]
fn each_queue_signals_its_own_vector_or_none() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, Some(3));
    rig.create(2, 2, None);
    let admin = rig.raised();
    assert!(!admin.is_empty() && admin.iter().all(|vector| *vector == 0), "{admin:?}");
    rig.run(1, read(1));
    assert_eq!(rig.raised(), [3]);
    rig.run(2, read(1));
    assert_eq!(rig.raised(), [], "interrupts are not enabled for this queue");
    let pair = rig.place(3, 3, 8);
    let status = rig.create_cq(&pair, Some(5));
    assert!(status.is(Status::INVALID_INTERRUPT_VECTOR), "{status}");
}

#[test]
fn completions_of_one_turn_are_one_signal() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, Some(1));
    rig.raised();
    for _ in 0..10 {
        rig.push(1, read(1));
    }
    rig.ring(1);
    rig.poll();
    assert_eq!(rig.raised(), [1]);
}

#[test]
fn a_masked_vector_is_pending_and_raised_when_it_is_unmasked() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, Some(1));
    rig.raised();
    let bar = rig.front.bar().clone();
    let control = bar.vector_table_offset() + 16 + 12;
    rig.write(control, 1);
    rig.run(1, read(1));
    assert_eq!(rig.raised(), []);
    assert_eq!(rig.read(bar.pending_bits_offset()), 1 << 1);
    rig.write(control, 0);
    rig.poll();
    assert_eq!(rig.raised(), [1]);
    assert_eq!(rig.read(bar.pending_bits_offset()), 0);
}

#[test]
fn coalescing_holds_completions_back_until_it_is_time() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, Some(1));
    let set = |fid, cdw11| SetFeatures { fid, cdw11, ..SetFeatures::default() }.to_command();
    // Four completions, or 200 microseconds.
    assert!(rig.admin(set(0x08, 3 | 2 << 8)).status().is_success());
    rig.raised();
    rig.run(1, read(1));
    assert_eq!(rig.raised(), []);
    rig.now = rig.now.after(Span::from_us(190));
    rig.poll();
    assert_eq!(rig.raised(), []);
    rig.now = rig.now.after(Span::from_us(10));
    rig.poll();
    assert_eq!(rig.raised(), [1]);
    for _ in 0..4 {
        rig.push(1, read(1));
    }
    rig.ring(1);
    rig.poll();
    assert_eq!(rig.raised(), [1], "enough of them");
    assert_eq!(core::iter::from_fn(|| rig.take(1)).count(), 4);
    assert!(rig.admin(set(0x09, 1 | 1 << 16)).status().is_success());
    rig.raised();
    rig.run(1, read(1));
    assert_eq!(rig.raised(), [1], "coalescing is disabled for this vector");
}
