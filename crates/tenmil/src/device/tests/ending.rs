//! Devices and threads that end: all waiting futures complete with an error.

use tenmil_base::Span;

use super::{Op, PAGE, Stand};
use crate::device::{IoError, IoErrorKind};

/// Three reads: one in the device, one that the device has no slot for, and one in the wait queue.
fn three_reads(stand: &mut Stand) -> Vec<Op> {
    let mut ops: Vec<Op> = (0..3).map(|lba| stand.read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.turn(2);
    assert_eq!(stand.slow.held(), 1);
    ops
}

/// Whether each operation has failed with `DeviceRemoved` and returned its buffer.
fn told(ops: &mut [Op]) -> Vec<bool> {
    let tell = |op: &mut Op| match op.poll() {
        Some(Err(IoError { why: IoErrorKind::DeviceRemoved, buffer, .. })) => buffer.is_some(),
        other => panic!("{other:?}"),
    };
    ops.iter_mut().map(tell).collect()
}

#[test]
fn a_backend_that_panics_fails_those_who_wait_for_it() {
    let mut stand = Stand::new(2, 1, 5);
    let baseline = stand.free_bytes();
    let mut ops = three_reads(&mut stand);
    stand.slow.inner(|inner| inner.panics = true);
    stand.turn(3);
    assert!(stand.device.is_removed());
    assert_eq!(told(&mut ops), [false, true, true]);
    drop(ops);
    let lost = baseline - stand.free_bytes();
    assert_eq!(lost, u64::from(PAGE), "what the device had is nobody's any more");
    // The device continues to write to memory that must have been leaked.
    let _rest = (stand.buffer(), stand.buffer(), stand.buffer());
    stand.slow.complete_all();
    assert_eq!(
        told(&mut [stand.read(9, stand.buffer())]),
        [true],
        "and later ones are told at once"
    );
}

#[test]
fn memory_that_a_backend_may_have_taken_when_it_panicked_is_lost() {
    let mut stand = Stand::new(2, 1, 5);
    let baseline = stand.free_bytes();
    stand.slow.inner(|inner| inner.panics_after_taking = true);
    let mut ops: Vec<Op> = (0..3).map(|lba| stand.read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.turn(3);
    assert!(stand.device.is_removed());
    assert_eq!(stand.slow.held(), 1);
    // Two requests were submitted and one was accepted. Which one is unknown after the panic.
    assert_eq!(told(&mut ops), [false, false, true]);
    drop(ops);
    assert_eq!(baseline - stand.free_bytes(), 2 * u64::from(PAGE));
    let _rest = (stand.buffer(), stand.buffer(), stand.buffer());
    stand.slow.complete_all();
}

#[test]
fn a_thread_that_ends_waits_for_the_device_first() {
    let mut stand = Stand::new(2, 1, 4);
    let baseline = stand.free_bytes();
    let mut ops = three_reads(&mut stand);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.turn(20);
    assert!(!stand.device.is_removed(), "the device has not answered yet");
    stand.slow.complete_all();
    stand.turn(5);
    assert!(stand.device.is_removed());
    assert!(ops.remove(0).poll().is_some_and(|result| result.is_ok()));
    assert_eq!(told(&mut ops), [true, true]);
    drop(ops);
    assert_eq!(stand.free_bytes(), baseline);
}

#[test]
fn a_device_that_never_answers_is_cut_off_with_its_memory() {
    let mut stand = Stand::new(2, 1, 4);
    let baseline = stand.free_bytes();
    let mut ops = three_reads(&mut stand);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.turn(2);
    stand.pass(Span::from_secs(2));
    stand.turn(2);
    assert!(stand.device.is_removed());
    assert_eq!(told(&mut ops), [false, true, true]);
    drop(ops);
    assert_eq!(baseline - stand.free_bytes(), u64::from(PAGE));
    stand.slow.complete_all();
}

#[test]
fn a_device_is_not_put_on_a_thread_that_has_ended() {
    let mut stand = Stand::new(2, 1, 4);
    stand.directory.end_thread(stand.thread.id()).unwrap();
    stand.turn(5);
    let limits = stand.device.limits().clone();
    let backend = super::SlowBackend { slow: stand.slow.clone(), limits };
    let buffers = &stand.device.shared().buffers;
    let refused = super::attach(&stand.thread, "late", backend, buffers).unwrap_err();
    assert_eq!(
        refused.text,
        "attach 'late': its light thread has ended, as its runtime was dropped"
    );
}
