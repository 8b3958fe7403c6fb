//! Waiting futures: for a slot, for a device that is full, and for a sleeping thread.

use tenmil_base::{IoStatus, Span};
use tenmil_linux::{CpuList, EventLoop, NextStep, Thread};
use tenmil_reactor::PollMode;

use super::{BLOCK, Op, Stand, pool};
use crate::access::Access;
use crate::device::{BufferPool, IoError, IoErrorKind};
use crate::runtime::Runtime;

/// Starts `count` reads and completes them one at a time. Returns the operations in the order of
/// completion.
fn one_by_one(stand: &mut Stand, count: u64) -> Vec<u64> {
    let mut ops: Vec<_> = (0..count).map(|lba| (lba, stand.read(lba, stand.buffer()))).collect();
    let mut ended = Vec::new();
    for _ in 0..count * 10 {
        ops.retain_mut(|(lba, op)| {
            let is_over = op.poll().is_some_and(|result| result.is_ok());
            ended.extend(is_over.then_some(*lba));
            !is_over
        });
        stand.turn(1);
        if stand.slow.held() > 0 {
            stand.slow.completion(0);
        }
    }
    ended
}

#[test]
fn futures_get_places_in_the_order_in_which_they_came() {
    let mut stand = Stand::new(1, 1, 16);
    assert!(one_by_one(&mut stand, 12).iter().copied().eq(0..12));
    assert!(stand.slow.inner(|inner| inner.taken.iter().copied().eq(0..12)));
}

#[test]
fn a_full_device_is_given_the_rest_in_order() {
    let mut stand = Stand::new(16, 1, 16);
    assert!(one_by_one(&mut stand, 12).iter().copied().eq(0..12));
    assert!(stand.slow.inner(|inner| inner.taken.iter().copied().eq(0..12)));
}

#[test]
fn whoever_leaves_the_line_holds_nobody_up() {
    let mut stand = Stand::new(1, 1, 8);
    let mut ops: Vec<Op> = (0..4).map(|lba| stand.read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.turn(2);
    stand.slow.complete_all();
    stand.turn(2);
    assert!(ops[0].poll().is_some());
    // The second one was woken for the free slot, and is dropped.
    drop(ops.remove(1));
    assert!(ops[1].poll().is_none(), "it has the place now");
    stand.turn(2);
    assert!(stand.slow.inner(|inner| inner.taken == [0, 2]));
}

#[test]
fn an_idle_device_lets_its_thread_sleep_and_an_operation_wakes_it() {
    let mut stand = Stand::new(4, 4, 4);
    for lba in 0..20 {
        assert!(stand.falls_asleep());
        let mut op = stand.read(lba, stand.buffer());
        assert!(op.poll().is_none());
        let mut ready = Vec::new();
        assert!(stand.sleeper.block(Span::default(), &mut ready), "the bell rang");
        stand.reactor.handle_wakeup(&ready);
        stand.turn(2);
        assert_eq!(stand.slow.held(), 1);
        stand.slow.complete_all();
        stand.turn(2);
        assert!(op.poll().is_some_and(|result| result.is_ok()));
    }
}

/// Like a network device whose connection is lost.
#[test]
fn a_device_that_takes_nothing_is_tried_again_when_it_says_and_keeps_nobody_awake_until_then() {
    let mut stand = Stand::new(4, 0, 4);
    let mut op = stand.read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.turn(2);
    assert!(!stand.falls_asleep(), "it does not say when");
    let again_at = stand.now().after(Span::from_secs(1));
    stand.slow.inner(|inner| inner.again_at = again_at);
    assert!(stand.falls_asleep());
    stand.reactor.handle_wakeup(&[]);
    assert!(matches!(stand.turn(1), NextStep::SleepUntil(at) if at <= again_at));
    stand.slow.inner(|inner| inner.room = 1);
    stand.pass(Span::from_secs(1));
    stand.turn(2);
    assert_eq!(stand.slow.held(), 1);
    stand.slow.complete_all();
    stand.turn(2);
    assert!(op.poll().is_some_and(|result| result.is_ok()));
}

/// The descriptor may still be readable for a completion that was reaped already: arming clears it.
#[test]
fn a_device_is_armed_for_a_sleep_even_if_it_owes_nothing() {
    let mut stand = Stand::new(4, 4, 4);
    assert!(stand.falls_asleep());
    assert_eq!(stand.slow.inner(|inner| inner.arms), 1);
    stand.reactor.handle_wakeup(&[]);
    assert!(stand.falls_asleep());
    assert_eq!(stand.slow.inner(|inner| inner.arms), 2);
}

#[test]
fn an_operation_that_begins_just_before_the_sleep_keeps_the_thread_awake() {
    let mut stand = Stand::new(4, 4, 4);
    while !matches!(stand.turn(1), NextStep::SleepUntil(_)) {}
    let mut op = stand.read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.sleeper.announce();
    let now = stand.now();
    assert!(stand.reactor.arm(now), "it has not been taken in yet");
}

#[test]
fn a_future_that_was_polled_by_another_task_wakes_that_one() {
    let mut stand = Stand::new(1, 1, 4);
    // One waits for the device, the other for a slot.
    let mut ops: Vec<Op> = (0..2).map(|lba| stand.read(lba, stand.buffer())).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    let begun: Vec<_> = ops.iter_mut().map(Op::hand_over).collect();
    assert!(ops.iter_mut().all(|op| op.poll().is_none()));
    stand.turn(2);
    stand.slow.complete_all();
    stand.turn(2);
    assert!(ops[0].poll().is_some() && ops[1].poll().is_none());
    assert_eq!(stand.turn(2), NextStep::Again);
    assert_eq!(stand.slow.held(), 1, "the other was told, and has the place");
    assert!(begun.iter().all(|woken| !woken.is_set()), "those who polled first were not");
}

#[test]
fn what_cannot_be_done_comes_back_with_its_buffer() {
    let mut stand = Stand::new(4, 4, 4);
    let odd = stand.device.buffer(BLOCK + 1).unwrap();
    let Some(Err(IoError { why, buffer, .. })) = stand.read(0, odd).poll() else {
        panic!("it is odd")
    };
    assert_eq!(why, IoErrorKind::Length { len_bytes: BLOCK + 1, block_size: BLOCK });
    assert!(buffer.is_some());

    let foreign = BufferPool::new(pool(1)).allocate(BLOCK).unwrap();
    let Some(Err(IoError { why, buffer, .. })) = stand.read(0, foreign).poll() else { panic!() };
    assert_eq!((why, buffer.is_some()), (IoErrorKind::ForeignBuffer, true));

    let mut op = stand.read(0, stand.buffer());
    assert!(op.poll().is_none());
    stand.turn(2);
    stand.slow.inner(|inner| inner.status = IoStatus::UNRECOVERED_READ);
    stand.slow.complete_all();
    stand.turn(2);
    let Some(Err(refused)) = op.poll() else { panic!("it was answered so") };
    let said = "slow: read of block 0: ";
    assert!(refused.to_string().starts_with(said), "{refused}, expected {said}");
    let IoError { why, buffer, .. } = refused;
    assert_eq!((why, buffer.is_some()), (IoErrorKind::Status(IoStatus::UNRECOVERED_READ), true));
}

#[test]
fn every_operation_reaches_an_emulated_ssd_from_several_os_threads() {
    let core = CpuList::allowed().iter().next();
    let rt = Runtime::builder().cores(core).pin(false).start().unwrap();
    let device = smol::block_on(rt.open("emu:ram", Access::ReadWrite)).unwrap();
    let baseline = device.shared().buffers.free_bytes();
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
        Thread::spawn("program", None, body).unwrap()
    };
    let programs: Vec<_> = (0..3).map(work).collect();
    programs.into_iter().for_each(Thread::join);
    drop(rt);
    assert!(device.is_removed());
    assert_eq!(device.shared().buffers.free_bytes(), baseline, "every buffer has come back");
}

#[test]
fn a_reactor_in_hybrid_mode_rests_for_three_quarters_of_what_the_device_takes() {
    let mut stand = Stand::new(2, 2, 5);
    stand.directory.set_poll(stand.reactor.id(), PollMode::Hybrid).unwrap();
    stand.turn(2);
    let begin = |stand: &mut Stand| {
        let mut op = stand.read(0, stand.buffer());
        assert!(op.poll().is_none());
        (op, stand.turn(2))
    };
    for _ in 0..64 {
        let (mut op, wait) = begin(&mut stand);
        assert!(!matches!(wait, NextStep::Pause(_)), "nothing is known yet");
        stand.pass(Span::from_us(100));
        stand.slow.completion(0);
        stand.turn(2);
        assert!(op.poll().is_some_and(|result| result.is_ok()));
    }
    let (_op, wait) = begin(&mut stand);
    let NextStep::Pause(rest) = wait else { panic!("{wait:?}") };
    assert!((70_000..80_000).contains(&rest.ns), "{rest}");
}
