//! Signaled vectors and their timing.

use tenmil_base::Span;
use tenmil_wire::admin::SetFeatures;
use tenmil_wire::{Status, TypedCommand};

use super::fixture::{SHARED, TransportFixture, read_command};

#[test]
fn each_queue_raises_its_own_vector_or_none() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, Some(3));
    rig.create_queue_pair(2, 2, None);
    let admin = rig.take_raised_vectors();
    assert!(!admin.is_empty() && admin.iter().all(|vector| *vector == 0), "{admin:?}");
    rig.run_command(1, read_command(1));
    assert_eq!(rig.take_raised_vectors(), [3]);
    rig.run_command(2, read_command(1));
    assert_eq!(rig.take_raised_vectors(), [], "interrupts are not enabled for this queue");
    let pair = rig.uncreated_queue_pair(3, 3, 8);
    let status = rig.create_completion_queue(&pair, Some(5));
    assert!(status.has_same_code_as(Status::INVALID_INTERRUPT_VECTOR), "{status}");
}

#[test]
fn completions_of_one_poll_raise_one_interrupt() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, Some(1));
    rig.take_raised_vectors();
    for _ in 0..10 {
        rig.push_command(1, read_command(1));
    }
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    assert_eq!(rig.take_raised_vectors(), [1]);
}

#[test]
fn masked_vector_is_raised_when_unmasked() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, Some(1));
    rig.take_raised_vectors();
    let bar = rig.front.bar_registers().clone();
    let control = bar.vector_table_offset() + 16 + 12;
    rig.write_register(control, 1);
    rig.run_command(1, read_command(1));
    assert_eq!(rig.take_raised_vectors(), []);
    assert_eq!(rig.read_register(bar.pending_bits_offset()), 1 << 1);
    rig.write_register(control, 0);
    rig.poll_transport();
    assert_eq!(rig.take_raised_vectors(), [1]);
    assert_eq!(rig.read_register(bar.pending_bits_offset()), 0);
}

#[test]
fn interrupt_coalescing_delays_until_its_time() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, Some(1));
    let set = |fid, cdw11| SetFeatures { fid, cdw11, ..SetFeatures::default() }.to_command();
    // Four completions, or 200 microseconds.
    assert!(rig.run_admin(set(0x08, 3 | 2 << 8)).status().is_success());
    rig.take_raised_vectors();
    rig.run_command(1, read_command(1));
    assert_eq!(rig.take_raised_vectors(), []);
    rig.now = rig.now.after(Span::from_us(190));
    rig.poll_transport();
    assert_eq!(rig.take_raised_vectors(), []);
    rig.now = rig.now.after(Span::from_us(10));
    rig.poll_transport();
    assert_eq!(rig.take_raised_vectors(), [1]);
    for _ in 0..4 {
        rig.push_command(1, read_command(1));
    }
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    assert_eq!(rig.take_raised_vectors(), [1], "enough of them");
    assert_eq!(core::iter::from_fn(|| rig.take_completion(1)).count(), 4);
    assert!(rig.run_admin(set(0x09, 1 | 1 << 16)).status().is_success());
    rig.take_raised_vectors();
    rig.run_command(1, read_command(1));
    assert_eq!(rig.take_raised_vectors(), [1], "coalescing is disabled for this vector");
}
