//! Cost of a wake-up per message over loopback, without any other work: a wait, a receive and a
//! send.
//!
//! `cargo bench -p tenmil-linux --bench wakeup`
//!
//! 1024 connections receive 400 messages per second in total, as from hosts that send keep-alives.
//! The thread waits for each, through a number of nested epoll instances, or polls at an interval.
//! CPU time is the kernel's value for the thread.

#![expect(clippy::disallowed_methods, reason = "the loop is bare: nothing of ours is in it")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use tenmil_base::{Random, Span};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::{Clock, NamedThread};

const CONNECTIONS: usize = 1_024;
const MESSAGES: u64 = 1_600;
const GAP: Span = Span::from_us(2_500);
const READABLE: Interest = Interest { readable: true, writable: false };

fn main() {
    println!("{:<34} {:>10} {:>8}", "", "us each", "waits");
    for (name, nested, gather) in [
        ("one epoll instance", 0, None),
        ("three, one in the other", 2, None),
        ("three, looked at every 10 ms", 2, Some(Span::from_ms(10))),
        ("three, looked at every 20 ms", 2, Some(Span::from_ms(20))),
    ] {
        let (each_us, waits) = bench_wakeup(nested, gather);
        println!("{name:<34} {each_us:>10.1} {waits:>8}");
    }
}

/// Microseconds of CPU time per message, and the number of waits.
fn bench_wakeup(nested: usize, gather: Option<Span>) -> (f64, u64) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let connect = |_| {
        let host = TcpStream::connect(address).expect("a connection");
        let (target, _) = listener.accept().expect("a connection");
        for end in [&host, &target] {
            end.set_nodelay(true).expect("no delay");
            end.set_nonblocking(true).expect("no waiting");
        }
        (host, target)
    };
    let (mut hosts, mut targets): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(connect).unzip();
    let send = move |_: &_| {
        let (clock, mut random) = (Clock::start(), Random::new(1));
        let mut next = clock.now();
        for _ in 0..MESSAGES {
            next = next.after(GAP);
            tenmil_linux::named_thread::sleep(next.since(clock.now()));
            let index = usize::try_from(random.below(CONNECTIONS as u64)).unwrap_or(0);
            // The reply to the previous message.
            let _ = hosts[index].read(&mut [0; 64]);
            hosts[index].write_all(&[0; 72]).expect("room");
        }
        hosts
    };
    let all = PollSet::new().expect("an epoll instance");
    let mut inner = Vec::new();
    for (token, target) in (0..).zip(&targets) {
        let mut last: Option<PollSet> = None;
        for _ in 0..nested {
            let watch = PollSet::new().expect("an epoll instance");
            match &last {
                Some(below) => watch.add(below, 0, READABLE),
                None => watch.add(target, 0, READABLE),
            }
            .expect("room");
            inner.extend(last.replace(watch));
        }
        match &last {
            Some(top) => all.add(top, token, READABLE),
            None => all.add(target, token, READABLE),
        }
        .expect("room");
        inner.extend(last);
    }
    let sender = NamedThread::spawn("sender", None, send).expect("a thread");
    let (before, mut waits, mut received, mut found) = (cpu_time_ns(), 0, 0, Vec::new());
    while received < MESSAGES {
        if let Some(gather) = gather {
            tenmil_linux::named_thread::sleep(gather);
        }
        all.wait(None, &mut found).expect("events");
        waits += 1;
        for ready in &found {
            let target = &mut targets[usize::try_from(ready.token).unwrap_or(0)];
            let mut bytes = [0; 720];
            let count = target.read(&mut bytes).expect("what was announced") / 72;
            (0..count).for_each(|_| target.write_all(&[0; 24]).expect("room"));
            received += count as u64;
        }
    }
    let used = cpu_time_ns() - before;
    drop(sender.join());
    (used as f64 / 1e3 / MESSAGES as f64, waits)
}

/// CPU time of this thread.
fn cpu_time_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
}
