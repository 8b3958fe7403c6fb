//! Waiting futures: for a slot, for a device that is full, and for a sleeping thread.

use tenmil_base::{IoStatus, Span};
use tenmil_linux::{CpuList, EventLoop, NamedThread, NextStep};
use tenmil_reactor::PollMode;

use super::{BLOCK, PolledOperation, TestReactor, buffer_pool};
use crate::access::Access;
use crate::device::{BufferPool, IoError, IoErrorKind};
use crate::runtime::Runtime;

/// Starts `count` reads and completes them one at a time. Returns the operations in the order of
/// completion.
fn complete_one_by_one(stand: &mut TestReactor, count: u64) -> Vec<u64> {
    let mut ops: Vec<_> =
        (0..count).map(|lba| (lba, stand.start_read(lba, stand.buffer()))).collect();
    let mut ended = Vec::new();
    for _ in 0..count * 10 {
        ops.retain_mut(|(lba, op)| {
            let is_over = op.poll().is_some_and(|result| result.is_ok());
            ended.extend(is_over.then_some(*lba));
            !is_over
        });
        stand.run_iterations(1);
        if stand.slow.held_request_count() > 0 {
            stand.slow.complete_request(0);
        }
    }
    ended
}

#[test]
fn futures_get_slots_in_request_order() {
    let mut stand = TestReactor::new(1, 1, 16);
    assert!(complete_one_by_one(&mut stand, 12).iter().copied().eq(0..12));
    assert!(stand.slow.with_state(|inner| inner.taken.iter().copied().eq(0..12)));
}

#[test]
fn full_device_receives_waiting_requests_in_order() {
    let mut stand = TestReactor::new(16, 1, 16);
    assert!(complete_one_by_one(&mut stand, 12).iter().copied().eq(0..12));
    assert!(stand.slow.with_state(|inner| inner.taken.iter().copied().eq(0..12)));
}

#[test]
fn dropped_waiting_future_delays_no_other() {
    let mut stand = TestReactor::new(1, 1, 8);
    let mut ops: Vec<PolledOperation> =
        (0..4).map(|lba| stand.start_read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.run_iterations(2);
    stand.slow.complete_all();
    stand.run_iterations(2);
    assert!(ops[0].poll().is_some());
    // The second one was woken for the free slot, and is dropped.
    drop(ops.remove(1));
    assert!(ops[1].poll().is_none(), "it has the place now");
    stand.run_iterations(2);
    assert!(stand.slow.with_state(|inner| inner.taken == [0, 2]));
}

#[test]
fn idle_device_lets_its_thread_sleep_and_an_operation_wakes_it() {
    let mut stand = TestReactor::new(4, 4, 4);
    for lba in 0..20 {
        assert!(stand.run_until_asleep());
        let mut op = stand.start_read(lba, stand.buffer());
        assert!(op.poll().is_none());
        let mut ready = Vec::new();
        assert!(stand.sleeper.sleep_until_ready(Span::default(), &mut ready), "the bell rang");
        stand.reactor.disarm(&ready);
        stand.run_iterations(2);
        assert_eq!(stand.slow.held_request_count(), 1);
        stand.slow.complete_all();
        stand.run_iterations(2);
        assert!(op.poll().is_some_and(|result| result.is_ok()));
    }
}

/// Like a network device whose connection is lost.
#[test]
fn device_that_accepts_nothing_is_retried_at_its_wake_time_without_spinning() {
    let mut stand = TestReactor::new(4, 0, 4);
    let mut op = stand.start_read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.run_iterations(2);
    assert!(!stand.run_until_asleep(), "it does not say when");
    let again_at = stand.now().after(Span::from_secs(1));
    stand.slow.with_state(|inner| inner.again_at = again_at);
    assert!(stand.run_until_asleep());
    stand.reactor.disarm(&[]);
    assert!(matches!(stand.run_iterations(1), NextStep::SleepUntil(at) if at <= again_at));
    stand.slow.with_state(|inner| inner.room = 1);
    stand.advance_time(Span::from_secs(1));
    stand.run_iterations(2);
    assert_eq!(stand.slow.held_request_count(), 1);
    stand.slow.complete_all();
    stand.run_iterations(2);
    assert!(op.poll().is_some_and(|result| result.is_ok()));
}

/// The descriptor may still be readable for a completion that was reaped already: arming clears it.
#[test]
fn idle_device_is_armed_before_sleep() {
    let mut stand = TestReactor::new(4, 4, 4);
    assert!(stand.run_until_asleep());
    assert_eq!(stand.slow.with_state(|inner| inner.arms), 1);
    stand.reactor.disarm(&[]);
    assert!(stand.run_until_asleep());
    assert_eq!(stand.slow.with_state(|inner| inner.arms), 2);
}

#[test]
fn operation_started_just_before_sleep_keeps_the_thread_awake() {
    let mut stand = TestReactor::new(4, 4, 4);
    while !matches!(stand.run_iterations(1), NextStep::SleepUntil(_)) {}
    let mut op = stand.start_read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.sleeper.announce_sleep();
    let now = stand.now();
    assert!(stand.reactor.arm(now), "it has not been taken in yet");
}

#[test]
fn future_polled_by_another_task_wakes_that_task() {
    let mut stand = TestReactor::new(1, 1, 4);
    // One waits for the device, the other for a slot.
    let mut ops: Vec<PolledOperation> =
        (0..2).map(|lba| stand.start_read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    let begun: Vec<_> = ops.iter_mut().map(PolledOperation::move_to_other_task).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.run_iterations(2);
    stand.slow.complete_all();
    stand.run_iterations(2);
    assert!(ops[0].poll().is_some() && ops[1].poll().is_none());
    assert_eq!(stand.run_iterations(2), NextStep::Again);
    assert_eq!(stand.slow.held_request_count(), 1, "the other was woken, and has the place");
    assert!(begun.iter().all(|woken| !woken.is_set()), "those who polled first were not");
}

#[test]
fn rejected_operation_returns_its_buffer() {
    let mut stand = TestReactor::new(4, 4, 4);
    let odd = stand.device.buffer(BLOCK + 1).unwrap();
    let Some(Err(IoError { why, buffer, .. })) = stand.start_read(0, odd).poll() else {
        panic!("it is odd")
    };
    assert_eq!(why, IoErrorKind::Length { len_bytes: BLOCK + 1, block_size: BLOCK });
    assert!(buffer.is_some());

    let foreign = BufferPool::new(buffer_pool(1)).allocate(BLOCK).unwrap();
    let Some(Err(IoError { why, buffer, .. })) = stand.start_read(0, foreign).poll() else {
        panic!()
    };
    assert_eq!((why, buffer.is_some()), (IoErrorKind::ForeignBuffer, true));

    let mut op = stand.start_read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.run_iterations(2);
    stand.slow.with_state(|inner| inner.status = IoStatus::UNRECOVERED_READ);
    stand.slow.complete_all();
    stand.run_iterations(2);
    let Some(Err(refused)) = op.poll() else { panic!("it was answered so") };
    let said = "slow: read of block 0: ";
    assert!(refused.to_string().starts_with(said), "{refused}, expected {said}");
    let IoError { why, buffer, .. } = refused;
    assert_eq!((why, buffer.is_some()), (IoErrorKind::Status(IoStatus::UNRECOVERED_READ), true));
}

#[test]
fn every_operation_reaches_an_emulated_ssd_from_several_threads() {
    let core = CpuList::allowed_cpus().iter().next();
    let rt = Runtime::builder().cores(core).pin(false).start().unwrap();
    let device = smol::block_on(rt.open("emu:ram", Access::ReadWrite)).unwrap();
    let baseline = device.device_state().buffers.free_bytes();
    let work = |lane: u8| {
        let device = device.clone();
        let body = move |_: &tenmil_linux::StopFlag| {
            smol::block_on(async {
                let mut buffer = device.buffer(BLOCK).unwrap();
                for round in 0..50 {
                    let lba = u64::from(lane) * 100 + round;
                    buffer.store(0, &[lane + 1; BLOCK as usize]);
                    buffer = device.write(lba, buffer).await.unwrap();
                    buffer = device.compare(lba, buffer).await.unwrap();
                    device.flush().await.unwrap();
                    // An operation whose future is dropped.
                    let other = device.buffer(BLOCK).unwrap();
                    smol::future::poll_once(device.read(lba, other)).await;
                    device.write_zeroes(lba, 1).await.unwrap();
                    let IoError { why, buffer: back, .. } =
                        device.compare(lba, buffer).await.unwrap_err();
                    assert_eq!(why, IoErrorKind::Status(IoStatus::COMPARE_FAILURE));
                    buffer = device.read(lba, back.unwrap()).await.unwrap();
                    assert!(buffer.to_vec().iter().all(|byte| *byte == 0));
                    device.deallocate(lba, 1).await.unwrap();
                }
            });
        };
        NamedThread::spawn("program", None, body).unwrap()
    };
    let programs: Vec<_> = (0..3).map(work).collect();
    programs.into_iter().for_each(NamedThread::join);
    drop(rt);
    assert!(device.is_removed());
    assert_eq!(device.device_state().buffers.free_bytes(), baseline, "every buffer has come back");
}

#[test]
fn hybrid_reactor_pauses_three_quarters_of_the_device_latency() {
    let mut stand = TestReactor::new(2, 2, 5);
    stand.directory.set_poll_mode(stand.reactor.id(), PollMode::Hybrid).unwrap();
    stand.run_iterations(2);
    let begin = |stand: &mut TestReactor| {
        let mut op = stand.start_read(0, stand.buffer());
        assert!(op.poll().is_none());
        (op, stand.run_iterations(2))
    };
    for _ in 0..64 {
        let (mut op, wait) = begin(&mut stand);
        assert!(!matches!(wait, NextStep::Pause(_)), "nothing is known yet");
        stand.advance_time(Span::from_us(100));
        stand.slow.complete_request(0);
        stand.run_iterations(2);
        assert!(op.poll().is_some_and(|result| result.is_ok()));
    }
    let (_op, wait) = begin(&mut stand);
    let NextStep::Pause(rest) = wait else { panic!("{wait:?}") };
    assert!((70_000..80_000).contains(&rest.ns), "{rest}");
}
