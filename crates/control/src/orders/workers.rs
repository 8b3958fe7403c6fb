//! Threads that do what the thread that serves must not wait for. They come when there is work, do what
//! waits, and go.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Span;
use host::{Clock, Stop, Thread};

use crate::refusal::{Code, Refusal};

/// Something to be done.
pub(super) type Work = Box<dyn FnOnce() + Send>;

/// The threads, and what waits for one.
#[derive(Default)]
pub(super) struct Workers(Mutex<Crew>);

#[derive(Default)]
struct Crew {
    waiting: VecDeque<Work>,
    /// Those that run, and those that have ended and were not looked at since.
    hands: Vec<Thread<()>>,
    /// Those that look for work.
    running: usize,
    is_over: bool,
}

/// Threads at once.
const HANDS_MAX: usize = 4;
/// What may wait: each connection waits for one thing at a time.
const WAITING_MAX: usize = 64;
/// How long the end of a thread is waited for when the process ends. What takes longer ends with it.
const END_MAX: Span = Span::from_ms(800);
const END_INTERVAL: Span = Span::from_ms(5);

impl Workers {
    /// Has something done, soon.
    pub(super) fn hire(self: &Arc<Self>, work: Work) -> Result<(), Refusal> {
        let mut crew = self.lock();
        if crew.is_over || crew.waiting.len() >= WAITING_MAX {
            let text = format!("orders: {} wait already, expected fewer", crew.waiting.len());
            return Err(Refusal::machine(Code::Busy, text).with_hint("say it again later"));
        }
        crew.hands.retain(|hand| !hand.is_finished());
        crew.waiting.push_back(work);
        if crew.running >= HANDS_MAX {
            return Ok(());
        }
        let workers = Arc::clone(self);
        match Thread::spawn("orders", None, move |stop| workers.work(stop)) {
            Ok(hand) => {
                crew.hands.push(hand);
                crew.running += 1;
            }
            // Those that are there do it.
            Err(_) if crew.running > 0 => {}
            Err(error) => {
                crew.waiting.pop_back();
                let text = format!("orders: start a thread: {error}");
                return Err(Refusal::machine(Code::NotDone, text));
            }
        }
        Ok(())
    }

    /// Does what waits, until nothing does.
    fn work(&self, stop: &Stop) {
        loop {
            let mut crew = self.lock();
            let work = if stop.is_stopped() { None } else { crew.waiting.pop_front() };
            let Some(work) = work else {
                crew.running -= 1;
                return;
            };
            drop(crew);
            work();
        }
    }

    /// Nothing more is begun; what is being done is waited for, but not long.
    pub(super) fn end(&self) {
        let mut crew = self.lock();
        crew.is_over = true;
        let (hands, waiting) = (std::mem::take(&mut crew.hands), std::mem::take(&mut crew.waiting));
        drop(crew);
        // Whoever waits for those is told that it is over.
        drop(waiting);
        end(hands);
    }

    fn lock(&self) -> MutexGuard<'_, Crew> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops threads and waits for them, but not long.
pub(super) fn end(hands: Vec<Thread<()>>) {
    hands.iter().for_each(|hand| hand.stop_flag().stop());
    let clock = Clock::start();
    let until = clock.now().after(END_MAX);
    while hands.iter().any(|hand| !hand.is_finished()) && clock.now() < until {
        host::thread::rest(END_INTERVAL);
    }
    for hand in hands {
        if !hand.is_finished() {
            // It waits for a device; to wait for it would keep the process from ending.
            std::mem::forget(hand);
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let crew = self.lock();
        out.debug_struct("Workers")
            .field("waiting", &crew.waiting.len())
            .field("running", &crew.running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{channel, sync_channel};
    use std::sync::{Arc, Mutex};

    use super::{HANDS_MAX, WAITING_MAX, Workers};
    use crate::refusal::Code;

    #[test]
    fn as_many_as_there_are_hands_work_at_once_and_the_rest_wait_in_order() {
        let workers = Arc::<Workers>::default();
        let (begun, begins) = channel();
        let (go, gate) = sync_channel(0);
        let gate = Arc::new(Mutex::new(gate));
        for number in 0..HANDS_MAX + 3 {
            let (begun, gate) = (begun.clone(), Arc::clone(&gate));
            let work = move || {
                begun.send(number).unwrap();
                gate.lock().unwrap().recv().unwrap();
            };
            workers.hire(Box::new(work)).unwrap();
        }
        let first: Vec<usize> = begins.iter().take(HANDS_MAX).collect();
        assert!(begins.try_recv().is_err(), "{first:?}");
        for number in HANDS_MAX..HANDS_MAX + 3 {
            go.send(()).unwrap();
            assert_eq!(begins.recv().unwrap(), number);
        }
        (0..HANDS_MAX).for_each(|_| go.send(()).unwrap());
        workers.end();
    }

    #[test]
    fn more_than_can_wait_is_refused_and_so_is_what_comes_after_the_end() {
        let workers = Arc::<Workers>::default();
        let (go, gate) = sync_channel::<()>(0);
        let gate = Arc::new(Mutex::new(gate));
        let work = || {
            let gate = Arc::clone(&gate);
            Box::new(move || assert!(gate.lock().unwrap().recv().is_err()))
        };
        let mut taken = 0;
        let refused = loop {
            match workers.hire(work()) {
                Ok(()) => taken += 1,
                Err(refused) => break refused,
            }
            assert!(taken <= HANDS_MAX + WAITING_MAX);
        };
        assert!(taken >= WAITING_MAX && refused.code == Code::Busy, "{taken} {refused}");
        drop(go);
        workers.end();
        assert_eq!(workers.hire(work()).unwrap_err().code, Code::Busy);
    }
}
