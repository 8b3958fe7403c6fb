//! Devices and threads that end: all waiting futures complete with an error.

use tenmil_base::Span;

use super::{PAGE, PolledOperation, TestReactor};
use crate::device::{IoError, IoErrorKind};

/// Three reads: one in the device, one that the device has no slot for, and one in the wait queue.
fn start_three_reads(stand: &mut TestReactor) -> Vec<PolledOperation> {
    let mut ops: Vec<PolledOperation> =
        (0..3).map(|lba| stand.start_read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.run_iterations(2);
    assert_eq!(stand.slow.held_request_count(), 1);
    ops
}

/// Whether each operation has failed with `DeviceRemoved` and returned its buffer.
fn removed_with_buffer_flags(ops: &mut [PolledOperation]) -> Vec<bool> {
    let tell = |op: &mut PolledOperation| match op.poll() {
        Some(Err(IoError { why: IoErrorKind::DeviceRemoved, buffer, .. })) => buffer.is_some(),
        other => panic!("{other:?}"),
    };
    ops.iter_mut().map(tell).collect()
}

#[test]
fn channel_panic_fails_waiting_operations() {
    let mut stand = TestReactor::new(2, 1, 5);
    let baseline = stand.free_bytes();
    let mut ops = start_three_reads(&mut stand);
    stand.slow.with_state(|inner| inner.panics = true);
    stand.run_iterations(3);
    assert!(stand.device.is_removed());
    assert_eq!(removed_with_buffer_flags(&mut ops), [false, true, true]);
    drop(ops);
    let lost = baseline - stand.free_bytes();
    assert_eq!(lost, u64::from(PAGE), "the buffer that the device had is leaked");
    // The device continues to write to memory that must have been leaked.
    let _rest = (stand.buffer(), stand.buffer(), stand.buffer());
    stand.slow.complete_all();
    assert_eq!(
        removed_with_buffer_flags(&mut [stand.start_read(9, stand.buffer())]),
        [true],
        "and later ones are told at once"
    );
}

#[test]
fn memory_submitted_to_a_panicked_channel_is_leaked() {
    let mut stand = TestReactor::new(2, 1, 5);
    let baseline = stand.free_bytes();
    stand.slow.with_state(|inner| inner.panics_after_taking = true);
    let mut ops: Vec<PolledOperation> =
        (0..3).map(|lba| stand.start_read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.run_iterations(3);
    assert!(stand.device.is_removed());
    assert_eq!(stand.slow.held_request_count(), 1);
    // Two requests were submitted and one was accepted. Which one is unknown after the panic.
    assert_eq!(removed_with_buffer_flags(&mut ops), [false, false, true]);
    drop(ops);
    assert_eq!(baseline - stand.free_bytes(), 2 * u64::from(PAGE));
    let _rest = (stand.buffer(), stand.buffer(), stand.buffer());
    stand.slow.complete_all();
}

#[test]
fn ending_thread_waits_for_the_device_first() {
    let mut stand = TestReactor::new(2, 1, 4);
    let baseline = stand.free_bytes();
    let mut ops = start_three_reads(&mut stand);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.run_iterations(20);
    assert!(!stand.device.is_removed(), "the device has not answered yet");
    stand.slow.complete_all();
    stand.run_iterations(5);
    assert!(stand.device.is_removed());
    assert!(ops.remove(0).poll().is_some_and(|result| result.is_ok()));
    assert_eq!(removed_with_buffer_flags(&mut ops), [true, true]);
    drop(ops);
    assert_eq!(stand.free_bytes(), baseline);
}

#[test]
fn device_that_never_completes_is_removed_and_its_memory_leaked() {
    let mut stand = TestReactor::new(2, 1, 4);
    let baseline = stand.free_bytes();
    let mut ops = start_three_reads(&mut stand);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.run_iterations(2);
    stand.advance_time(Span::from_secs(2));
    stand.run_iterations(2);
    assert!(stand.device.is_removed());
    assert_eq!(removed_with_buffer_flags(&mut ops), [false, true, true]);
    drop(ops);
    assert_eq!(baseline - stand.free_bytes(), u64::from(PAGE));
    stand.slow.complete_all();
}

#[test]
fn device_cannot_be_attached_to_an_ended_thread() {
    let mut stand = TestReactor::new(2, 1, 4);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.run_iterations(5);
    let limits = stand.device.limits().clone();
    let backend = super::ManualChannel { slow: stand.slow.clone(), limits };
    let buffers = &stand.device.device_state().buffers;
    let refused = super::attach_device(&stand.thread, "late", backend, buffers).unwrap_err();
    assert_eq!(
        refused.text,
        "attach 'late': its light thread has ended, as its runtime was dropped"
    );
}
