//! Sleeping and waking on the real kernel, with and without the optional system calls.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use tenmil_base::Span;

use super::{Barrier, COALESCE_DELAY, Sleeper};
use crate::clock::kernel_ns;
use crate::thread::Thread;

const LONG: Span = Span::from_secs(20);
const NOW: Span = Span { ns: 0 };

/// One sleeper of each kind that this machine supports.
fn sleepers() -> [Sleeper; 3] {
    let coarse = Sleeper::new().unwrap();
    coarse.sources.prompt.count_milliseconds();
    [Sleeper::new().unwrap(), Sleeper::with_fences().unwrap(), coarse]
}

/// Number of writes to the eventfd since the last call.
fn writes(sleeper: &Sleeper) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(&sleeper.shared.event, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(errno) => {
            assert_eq!(errno, Errno::AGAIN);
            0
        }
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal(event: &OwnedFd) {
    rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
}

fn elapsed<R>(body: impl FnOnce() -> R) -> (R, Span) {
    let begun = kernel_ns();
    let result = body();
    (result, Span { ns: kernel_ns() - begun })
}

#[test]
fn a_rest_ends_with_a_bell_and_with_no_descriptor() {
    for mut sleeper in sleepers() {
        let (waker, event) = (sleeper.notifier(), event());
        sleeper.sources().add(&event, 7).unwrap();
        signal(&event);
        for _ in 0..3 {
            sleeper.announce_pause();
            let (rang, rested) = elapsed(|| sleeper.pause(Span::from_ms(2)));
            assert!(
                !rang && rested >= Span::from_ms(2),
                "{rested}: neither a descriptor nor an old ring"
            );
            sleeper.announce_pause();
            waker.notify();
            let (rang, rested) = elapsed(|| sleeper.pause(LONG));
            assert!(rang && rested < LONG);
            // A notification that ended a sleep is stale afterwards.
            sleeper.announce();
            waker.notify();
            assert!(sleeper.block(LONG, &mut Vec::new()));
        }
    }
}

#[test]
fn a_ring_costs_no_system_call_while_the_sleeper_is_awake() {
    for mut sleeper in sleepers() {
        let waker = sleeper.notifier();
        waker.notify();
        assert_eq!(writes(&sleeper), 0, "not yet announced");
        sleeper.announce();
        sleeper.cancel();
        waker.notify();
        assert_eq!(writes(&sleeper), 0, "taken back");
        sleeper.announce();
        sleeper.block(NOW, &mut Vec::new());
        waker.notify();
        assert_eq!(writes(&sleeper), 0, "awake again");
    }
}

#[test]
fn a_sleep_is_ended_by_one_write_however_many_ring() {
    for mut sleeper in sleepers() {
        let (waker, other) = (sleeper.notifier(), sleeper.notifier().clone());
        for _ in 0..3 {
            sleeper.announce();
            waker.notify();
            other.notify();
            waker.notify();
            assert_eq!(writes(&sleeper), 1);
        }
    }
}

#[test]
fn every_sleep_can_be_ended_though_the_count_is_never_read() {
    for mut sleeper in sleepers() {
        let waker = sleeper.notifier();
        for _ in 0..100 {
            sleeper.announce();
            waker.notify();
            assert!(sleeper.block(LONG, &mut Vec::new()));
            assert!(!sleeper.block(NOW, &mut Vec::new()), "one ring ends one sleep");
        }
        assert_eq!(writes(&sleeper), 100);
    }
}

#[test]
fn a_ring_before_an_announcement_is_taken_back_ends_the_next_sleep() {
    for mut sleeper in sleepers() {
        sleeper.announce();
        sleeper.notifier().notify();
        sleeper.cancel();
        sleeper.announce();
        assert!(sleeper.block(LONG, &mut Vec::new()));
    }
}

#[test]
fn a_ring_from_another_thread_ends_a_sleep() {
    for mut sleeper in sleepers() {
        let waker = sleeper.notifier();
        sleeper.announce();
        let ringer = Thread::spawn("ringer", None, move |_| waker.notify()).unwrap();
        let (rang, slept) = elapsed(|| sleeper.block(LONG, &mut Vec::new()));
        assert!(rang && slept < LONG);
        ringer.join();
    }
}

#[test]
fn a_bell_outlives_its_sleeper() {
    let mut sleeper = Sleeper::new().unwrap();
    let waker = sleeper.notifier();
    sleeper.announce();
    drop(sleeper);
    waker.notify();
}

#[test]
fn a_sleep_lasts_until_its_deadline_and_not_less() {
    for mut sleeper in sleepers() {
        for at_most in [Span::from_us(300), Span::from_us(1_500), Span::from_ms(3)] {
            sleeper.announce();
            let (rang, slept) = elapsed(|| sleeper.block(at_most, &mut Vec::new()));
            assert!(!rang);
            assert!(slept >= at_most, "{slept} of {at_most}");
        }
    }
}

#[test]
fn a_sleep_without_end_can_be_asked_for() {
    for mut sleeper in sleepers() {
        sleeper.announce();
        sleeper.notifier().notify();
        assert!(sleeper.block(Span { ns: u64::MAX }, &mut Vec::new()));
    }
}

#[test]
fn descriptors_that_are_ready_end_a_sleep_and_are_named() {
    for mut sleeper in sleepers() {
        let sources = sleeper.sources();
        let events = [event(), event(), event()];
        for (token, event) in (10..).zip(&events) {
            sources.add(event, token).unwrap();
        }
        let mut ready = vec![7];
        sleeper.announce();
        assert!(!sleeper.block(NOW, &mut ready));
        assert_eq!(ready, [7]);

        signal(&events[0]);
        signal(&events[2]);
        for _ in 0..2 {
            ready.clear();
            sleeper.announce();
            assert!(!sleeper.block(LONG, &mut ready), "no bell");
            ready.sort_unstable();
            assert_eq!(ready, [10, 12], "for as long as nobody reads them");
        }
        sources.remove(&events[0]).unwrap();
        ready.clear();
        sleeper.announce();
        sleeper.notifier().notify();
        assert!(sleeper.block(LONG, &mut ready), "the bell as well");
        assert_eq!(ready, [12]);
    }
}

#[test]
fn a_descriptor_of_which_changes_are_heard_ends_a_sleep_for_each_and_no_other() {
    for mut sleeper in sleepers() {
        let (plain, inner) = (event(), event());
        let nest = crate::poll_set::PollSet::new().unwrap();
        let readable = crate::poll_set::Interest { readable: true, writable: false };
        nest.add(&inner, 0, readable).unwrap();
        let sources = sleeper.sources();
        sources.add(&plain, 1).unwrap();
        sources.add(&nest, 2).unwrap();
        let mut slept = |at_most| {
            let mut ready = Vec::new();
            sleeper.announce();
            sleeper.block(at_most, &mut ready);
            ready.sort_unstable();
            ready
        };
        signal(&plain);
        signal(&inner);
        assert_eq!(slept(LONG), [1, 2]);
        sources.set_edge_triggered(&plain, 1).unwrap();
        sources.set_edge_triggered(&nest, 2).unwrap();
        assert_eq!(slept(LONG), [1, 2], "once for what it was readable for");
        for _ in 0..3 {
            assert_eq!(slept(NOW), [], "they have been readable all the time");
            signal(&plain);
            assert_eq!(slept(LONG), [1]);
            signal(&inner);
            assert_eq!(slept(LONG), [2], "through the set that it is in");
        }
        sources.set_level_triggered(&plain, 1).unwrap();
        assert_eq!((slept(LONG), slept(LONG)), (vec![1], vec![1]));
        sources.set_level_triggered(&nest, 2).unwrap();
        assert_eq!((slept(LONG), slept(LONG)), (vec![1, 2], vec![1, 2]));
    }
}

#[test]
fn more_descriptors_than_a_wait_can_name_are_all_named_in_time() {
    for mut sleeper in sleepers() {
        let events: Vec<_> = (0..100).map(|_| event()).collect();
        for (token, event) in (0..).zip(&events) {
            sleeper.sources().add(event, token).unwrap();
            signal(event);
        }
        let mut ready = Vec::new();
        for _ in 0..4 {
            sleeper.block(LONG, &mut ready);
        }
        assert_eq!(ready.iter().collect::<BTreeSet<_>>().len(), events.len());
    }
}

fn read(event: &OwnedFd) {
    rustix::io::read(event, &mut [0; 8]).unwrap();
}

/// Sleeps, and returns what ended the sleep and its duration.
fn sleep(sleeper: &mut Sleeper, at_most: Span) -> (Vec<u64>, Span) {
    let mut ready = Vec::new();
    sleeper.announce();
    let (_, slept) = elapsed(|| sleeper.block(at_most, &mut ready));
    ready.sort_unstable();
    (ready, slept)
}

#[test]
fn what_lingers_ends_a_sleep_at_once_if_nothing_of_the_kind_came_just_before() {
    for mut sleeper in sleepers() {
        let sources = sleeper.sources();
        let events = [event(), event()];
        for (token, event) in (1..).zip(&events) {
            sources.add(event, token).unwrap();
            sources.set_coalesced(event, token).unwrap();
        }
        // On a busy machine single sleeps may be long, but not all of them.
        let mut shortest = LONG;
        for _ in 0..10 {
            signal(&events[0]);
            let (ready, slept) = sleep(&mut sleeper, LONG);
            assert_eq!(ready, [1]);
            shortest = shortest.min(slept);
            read(&events[0]);

            signal(&events[1]);
            let (ready, slept) = sleep(&mut sleeper, LONG);
            assert_eq!(ready, [2]);
            assert!(slept >= COALESCE_DELAY, "{slept}: it came right after another one");
            read(&events[1]);

            let whole = Span { ns: COALESCE_DELAY.ns * 2 };
            let (ready, slept) = sleep(&mut sleeper, whole);
            assert_eq!(ready, []);
            assert!(slept >= whole, "{slept}: nothing has come");
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");
    }
}

#[test]
fn what_lingers_is_taken_along_by_whatever_is_seen_first_and_hurries_when_it_is_told_to() {
    for mut sleeper in sleepers() {
        let sources = sleeper.sources();
        let events = [event(), event(), event()];
        for (token, event) in (1..).zip(&events) {
            sources.add(event, token).unwrap();
        }
        sources.set_coalesced(&events[0], 1).unwrap();
        sources.set_coalesced(&events[1], 2).unwrap();
        let mut shortest = LONG;
        for _ in 0..10 {
            signal(&events[0]);
            assert_eq!(sleep(&mut sleeper, LONG).0, [1]);
            read(&events[0]);
            signal(&events[1]);
            signal(&events[2]);
            let (ready, slept) = sleep(&mut sleeper, LONG);
            assert_eq!(ready, [2, 3]);
            shortest = shortest.min(slept);
            read(&events[2]);
            let mut ready = Vec::new();
            sleeper.poll_ready(&mut ready);
            assert_eq!(ready, [2], "and by a look");
            read(&events[1]);
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");

        sources.clear_coalesced(&events[1], 2).unwrap();
        shortest = LONG;
        for _ in 0..10 {
            signal(&events[0]);
            assert_eq!(sleep(&mut sleeper, LONG).0, [1]);
            read(&events[0]);
            signal(&events[1]);
            let (ready, slept) = sleep(&mut sleeper, LONG);
            assert_eq!(ready, [2]);
            shortest = shortest.min(slept);
            read(&events[1]);
        }
        assert!(shortest < COALESCE_DELAY, "{shortest}");
        sources.remove(&events[1]).unwrap();
        assert!(
            sources.clear_coalesced(&events[1], 2).is_err(),
            "it is not among those that linger"
        );
    }
}

#[test]
fn more_that_linger_than_a_look_can_name_are_all_named_in_time() {
    for mut sleeper in sleepers() {
        let events: Vec<_> = (0..100).map(|_| event()).collect();
        for (token, event) in (0..).zip(&events) {
            sleeper.sources().add(event, token).unwrap();
            sleeper.sources().set_coalesced(event, token).unwrap();
            signal(event);
        }
        let mut ready = Vec::new();
        for _ in 0..4 {
            sleeper.block(LONG, &mut ready);
        }
        assert_eq!(ready.iter().collect::<BTreeSet<_>>().len(), events.len());
    }
}

#[test]
fn the_tokens_of_the_bell_and_of_what_lingers_are_refused() {
    let sleeper = Sleeper::new().unwrap();
    for token in [u64::MAX, u64::MAX - 1] {
        let refused = sleeper.sources().add(event(), token).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    }
    let twice = event();
    sleeper.sources().add(&twice, 1).unwrap();
    assert!(sleeper.sources().add(&twice, 2).is_err());
    sleeper.sources().remove(&twice).unwrap();
    assert!(sleeper.sources().remove(&twice).is_err());
}

#[test]
fn a_kernel_without_these_system_calls_is_made_do_with() {
    let denied = || {
        let mut granted = Sleeper::new().unwrap();
        if let Err(errno) = filter::deny(&[libc::SYS_epoll_pwait2, libc::SYS_membarrier]) {
            println!("skipped: system calls cannot be denied here ({errno})");
            return;
        }
        let mut ready = Vec::new();
        let mut sleeper = Sleeper::new().unwrap();
        assert_eq!(sleeper.barrier(), Barrier::FullFences);
        let at_most = Span::from_us(1_500);
        let (rang, slept) = elapsed(|| sleeper.block(at_most, &mut ready));
        assert!(!rang && slept >= at_most);
        sleeper.announce();
        sleeper.notifier().notify();
        assert!(sleeper.block(LONG, &mut ready));

        if granted.barrier() == Barrier::Expedited {
            granted.announce();
            let (rang, slept) = elapsed(|| granted.block(LONG, &mut ready));
            assert!(!rang && slept < LONG, "without a barrier no sleep is long");
        }
    };
    // The filter belongs to the thread and ends with it.
    Thread::spawn("denied", None, move |_| denied()).unwrap().join();
}

mod filter {
    use std::io;

    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter, sock_fprog};

    /// Makes the kernel answer ENOSYS to these system calls of the current thread, permanently.
    pub(super) fn deny(calls: &[libc::c_long]) -> io::Result<()> {
        let statement = |code: u32, k: u32, jt: u8| sock_filter {
            code: u16::try_from(code).unwrap(),
            jt,
            jf: 0,
            k,
        };
        let enosys = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::ENOSYS).unwrap();
        // The system call number is the first word of the filter's input.
        let mut program = vec![statement(BPF_LD | BPF_W | BPF_ABS, 0, 0)];
        for (index, call) in calls.iter().enumerate() {
            let to_the_refusal = u8::try_from(calls.len() - index).unwrap();
            let number = u32::try_from(*call).unwrap();
            program.push(statement(BPF_JMP | BPF_JEQ | BPF_K, number, to_the_refusal));
        }
        program.push(statement(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW, 0));
        program.push(statement(BPF_RET | BPF_K, enosys, 0));
        let len = u16::try_from(program.len()).unwrap();
        let program = sock_fprog { len, filter: program.as_mut_ptr() };
        rustix::thread::set_no_new_privs(true)?;
        // SAFETY: the program and its instructions outlive the call; the kernel copies and checks
        // them.
        let set = unsafe {
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
