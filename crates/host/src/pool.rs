//! A few threads for what may block: opening files, looking up names, binding devices.
//!
//! A thread that polls hands such a job in and polls on; the job answers through what it captured, a
//! [`Sender`](crate::Sender) and a [`Bell`](crate::Bell) for instance.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::turn::is_turning;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The threads and their queue. Threads are started when there is work that no idle one could take.
pub struct Pool(Intake);

/// Where jobs are handed in to a pool. Unlike the pool itself it may go anywhere and at any time, in
/// one of the pool's own threads too: nothing waits for jobs when it does.
#[derive(Clone)]
pub struct Intake {
    shared: Arc<Shared>,
    threads_max: usize,
    waiting_max: usize,
}

/// Something to do that may take its time.
pub struct Job {
    name: &'static str,
    work: Box<dyn FnOnce() + Send>,
}

/// A job that did not answer because it panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked {
    /// The job's name.
    pub job: &'static str,
    /// What it said.
    pub message: String,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when a job is queued and when the pool ends.
    changed: Condvar,
    /// Where the pool was made. A thread that polls is bound to one processor, and its children
    /// would be bound to the same.
    processors: Option<CpuSet>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: Vec<&'static str>,
    panicked: Vec<Panicked>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    ended: bool,
}

/// So many panics are kept for whoever asks; later ones are only printed.
const PANICKED_MAX: usize = 64;

impl Job {
    /// A job with a name to be reported by.
    pub fn new(name: &'static str, work: impl FnOnce() + Send + 'static) -> Self {
        Self { name, work: Box::new(work) }
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl Pool {
    /// A pool of up to `threads_max` threads, with room for `waiting_max` jobs that no thread has
    /// begun. Starts none yet; they will run where the current thread may run.
    pub fn new(threads_max: usize, waiting_max: usize) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            processors: sched_getaffinity(None).ok(),
        };
        Self(Intake { shared: Arc::new(shared), threads_max, waiting_max })
    }

    /// Where jobs are handed in by those who do not own the pool.
    pub fn intake(&self) -> Intake {
        self.0.clone()
    }

    /// As [`Intake::submit`].
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        self.0.submit(job)
    }

    /// The names of the jobs that have begun and not ended.
    pub fn running(&self) -> Vec<&'static str> {
        self.0.shared.lock().running.clone()
    }

    /// Takes the reports of jobs that panicked.
    pub fn take_panicked(&self) -> Vec<Panicked> {
        std::mem::take(&mut self.0.shared.lock().panicked)
    }
}

impl Intake {
    /// Hands a job in. It comes back if the queue is full, if not even one thread could be started,
    /// or if the pool has gone. A job that was taken is run, even if the pool is dropped.
    ///
    /// Does not wait for any job.
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        let mut state = self.shared.lock();
        if state.ended || state.waiting.len() >= self.waiting_max {
            return Err(job);
        }
        if state.wants_a_thread() && state.threads.len() < self.threads_max {
            // One thread that exists will come to it, later.
            let started = self.start(state.threads.len());
            state.threads.extend(started.ok());
        }
        if state.threads.is_empty() {
            return Err(job);
        }
        state.waiting.push_back(job);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Hands in a job that must be run, and neither run nor dropped by a thread that polls. Where the
    /// pool does not take it, a thread of its own does, for which nobody waits. It comes back only if
    /// the machine has no thread to give.
    ///
    /// Does not wait for any job.
    pub fn submit_surely(&self, job: Job) -> Result<(), Job> {
        let Err(job) = self.submit(job) else { return Ok(()) };
        // A thread that cannot be started drops what it was given.
        let kept = Arc::new(Mutex::new(Some(job)));
        let take =
            |kept: &Mutex<Option<Job>>| kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (theirs, shared) = (Arc::clone(&kept), Arc::clone(&self.shared));
        let thread = std::thread::Builder::new().name("pool-late".into());
        let started = thread.spawn(move || {
            shared.unbind();
            if let Some(job) = take(&theirs) {
                // A panic has been printed, and there is nobody to ask for it any more.
                let _ = catch_unwind(AssertUnwindSafe(job.work));
            }
        });
        match started {
            Ok(_) => Ok(()),
            Err(_) => take(&kept).map_or(Ok(()), Err),
        }
    }

    fn start(&self, number: usize) -> std::io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(format!("pool-{number}"));
        thread.spawn(move || {
            shared.unbind();
            shared.work();
        })
    }
}

impl Drop for Pool {
    /// Waits until every job that was taken has been run. A thread that [turns](is_turning) does not
    /// wait: the jobs are run all the same.
    fn drop(&mut self) {
        let threads = {
            let mut state = self.0.shared.lock();
            state.ended = true;
            std::mem::take(&mut state.threads)
        };
        self.0.shared.changed.notify_all();
        if is_turning() {
            return;
        }
        for thread in threads {
            // Panics of jobs do not get here.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Whether every idle thread already has a job waiting for it.
    fn wants_a_thread(&self) -> bool {
        self.waiting.len() >= self.idle
    }
}

impl Shared {
    /// The state is whole whenever the lock is free, whatever happened to its last owner.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the present thread run where the pool was made.
    fn unbind(&self) {
        if let Some(processors) = &self.processors {
            // A set that is no longer allowed leaves the thread where it was started.
            let _ = sched_setaffinity(None, processors);
        }
    }

    /// What a thread does until the pool has ended and nothing is left to do.
    fn work(&self) {
        while let Some(Job { name, work }) = self.next() {
            let ended = catch_unwind(AssertUnwindSafe(work));
            let mut state = self.lock();
            if let Some(index) = state.running.iter().position(|running| *running == name) {
                state.running.swap_remove(index);
            }
            if let Err(panic) = ended
                && state.panicked.len() < PANICKED_MAX
            {
                state.panicked.push(Panicked { job: name, message: said(panic.as_ref()) });
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                state.running.push(job.name);
                return Some(job);
            }
            if state.ended {
                return None;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// The message of a panic.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("something that is not text")
        .to_owned()
}

impl fmt::Display for Panicked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "run {}: panicked: {}", self.job, self.message)
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Job").field(&self.name).finish()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.shared.lock();
        out.debug_struct("Pool")
            .field("threads", &state.threads.len())
            .field("waiting", &state.waiting)
            .field("running", &state.running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Barrier};

    use base::Span;

    use super::{Job, Panicked, Pool, State};
    use crate::{Clock, Cores, Sleeper, Thread, Turn, Wait, mailbox, turn};

    /// A job that says that it runs, then waits to be released.
    fn held(name: &'static str) -> (Job, Receiver<()>, Sender<()>) {
        let (begin, begun) = channel();
        let (release, released) = channel();
        let job = Job::new(name, move || {
            // Nobody has to listen to either.
            let _ = begin.send(());
            let _ = released.recv();
        });
        (job, begun, release)
    }

    #[test]
    fn a_job_answers_by_message_and_wakes_who_asked() {
        let pool = Pool::new(2, 4);
        let mut sleeper = Sleeper::new().unwrap();
        let (sender, mut receiver) = mailbox(1);
        let bell = sleeper.bell();
        let job = Job::new("add", move || {
            sender.send(3 + 4).unwrap();
            bell.ring();
        });
        pool.submit(job).unwrap();
        while receiver.is_empty() {
            sleeper.announce();
            if receiver.is_empty() {
                sleeper.block(Span::from_secs(20), &mut Vec::new());
            }
            sleeper.cancel();
        }
        assert_eq!(receiver.receive(), Some(7));
    }

    #[test]
    fn an_intake_outlives_its_pool_and_takes_nothing_more() {
        let pool = Pool::new(1, 4);
        let intake = pool.intake();
        let (send, ran) = channel();
        let (last, again) = (intake.clone(), send.clone());
        let job = Job::new("hands in", move || {
            let second = Job::new("second", move || again.send(2).unwrap());
            last.submit(second).unwrap();
            // The job's own intake goes within a thread of the pool.
            send.send(1).unwrap();
        });
        intake.submit(job).unwrap();
        assert_eq!((ran.recv().unwrap(), ran.recv().unwrap()), (1, 2));
        drop(pool);
        assert_eq!(intake.submit(Job::new("late", || {})).unwrap_err().name(), "late");
    }

    /// A turn that drops a pool, and says when that is done.
    struct Drops(Option<Pool>, Sender<()>);

    impl Turn for Drops {
        fn turn(&mut self, _: base::Instant) -> Wait {
            drop(self.0.take());
            self.1.send(()).unwrap();
            Wait::Ended
        }

        fn arm(&mut self, _: base::Instant) -> bool {
            false
        }

        fn woken(&mut self, _: &[u64]) {}
    }

    #[test]
    fn a_thread_that_turns_waits_for_no_job() {
        let pool = Pool::new(1, 4);
        let (job, begun, release) = held("held");
        let (send, ran) = channel();
        pool.submit(job).unwrap();
        pool.submit(Job::new("after", move || send.send(()).unwrap())).unwrap();
        begun.recv().unwrap();
        let (tell, dropped) = channel();
        let turns = Thread::spawn("turns", None, move |_| {
            let mut drops = Drops(Some(pool), tell);
            turn::run(&mut drops, &Clock::kernel(), &mut Sleeper::new().unwrap());
        });
        dropped.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        drop(release);
        ran.recv().unwrap();
        turns.unwrap().join();
    }

    #[test]
    fn what_must_be_run_is_run_where_the_pool_is_full_or_gone() {
        let me = std::thread::current().id();
        let look = |intake: &super::Intake| {
            let (send, ran) = channel();
            let job = Job::new("close", move || send.send(std::thread::current().id()).unwrap());
            intake.submit_surely(job).unwrap();
            assert_ne!(ran.recv().unwrap(), me);
        };
        let pool = Pool::new(1, 1);
        let intake = pool.intake();
        look(&intake);
        let (job, begun, release) = held("held");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        pool.submit(Job::new("waits", || {})).unwrap();
        look(&intake);
        drop(release);
        drop(pool);
        look(&intake);
    }

    #[test]
    fn a_full_queue_gives_the_job_back() {
        let pool = Pool::new(1, 2);
        let (job, begun, release) = held("first");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        assert_eq!(pool.running(), ["first"]);
        pool.submit(Job::new("second", || {})).unwrap();
        pool.submit(Job::new("third", || {})).unwrap();
        let refused = pool.submit(Job::new("fourth", || {})).unwrap_err();
        assert_eq!(refused.name(), "fourth");
        assert!(format!("{pool:?}").contains("second"), "{pool:?}");
        drop(release);
    }

    #[test]
    fn threads_are_started_when_they_are_wanted_and_no_more_than_allowed() {
        let pool = Pool::new(3, 16);
        let threads = || pool.0.shared.lock().threads.len();
        assert_eq!(threads(), 0);
        let mut releases = Vec::new();
        for (count, name) in (1..).zip(["one", "two", "three"]) {
            let (job, begun, release) = held(name);
            pool.submit(job).unwrap();
            begun.recv().unwrap();
            assert_eq!(threads(), count);
            releases.push(release);
        }
        let names = pool.running().into_iter().collect::<BTreeSet<_>>();
        assert_eq!(names, BTreeSet::from(["one", "two", "three"]));
        let (job, begun, _release) = held("four");
        pool.submit(job).unwrap();
        assert_eq!(threads(), 3);
        releases.clear();
        begun.recv().unwrap();
    }

    #[test]
    fn an_idle_thread_is_used_again() {
        let pool = Pool::new(8, 8);
        for _ in 0..20 {
            let (job, begun, release) = held("again");
            pool.submit(job).unwrap();
            begun.recv().unwrap();
            drop(release);
            while pool.0.shared.lock().idle == 0 {
                crate::thread::give_way();
            }
        }
        assert_eq!(pool.0.shared.lock().threads.len(), 1);
        assert!(pool.running().is_empty());
    }

    #[test]
    fn an_idle_thread_is_counted_on_once() {
        // A thread that was woken, but has not run since, still calls itself idle.
        let mut state = State { idle: 2, ..State::default() };
        for wanted in [false, false, true] {
            assert_eq!(state.wants_a_thread(), wanted);
            state.waiting.push_back(Job::new("open", || {}));
        }
    }

    #[test]
    fn jobs_run_side_by_side() {
        let pool = Pool::new(4, 8);
        let meeting = Arc::new(Barrier::new(4));
        for _ in 0..4 {
            let meeting = Arc::clone(&meeting);
            let meet = move || {
                meeting.wait();
            };
            pool.submit(Job::new("meet", meet)).unwrap();
        }
        // Dropping waits for them, and they end only if all four have met.
    }

    #[test]
    fn what_was_taken_is_run_even_if_the_pool_goes() {
        let pool = Pool::new(1, 100);
        let (sender, receiver) = channel();
        for number in 0..100 {
            let sender = sender.clone();
            let job = Job::new("count", move || sender.send(number).unwrap());
            pool.submit(job).unwrap();
        }
        drop((pool, sender));
        assert!(receiver.into_iter().eq(0..100));
    }

    #[test]
    fn a_job_that_panics_is_reported_by_name_and_its_thread_goes_on() {
        let pool = Pool::new(1, 8);
        let number = 7;
        pool.submit(Job::new("open", || panic!("on purpose"))).unwrap();
        pool.submit(Job::new("bind", move || panic!("at {number}"))).unwrap();
        let (job, begun, release) = held("after");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        let panicked = |job, message: &str| Panicked { job, message: message.into() };
        assert_eq!(
            pool.take_panicked(),
            [panicked("open", "on purpose"), panicked("bind", "at 7")]
        );
        assert!(pool.take_panicked().is_empty());
        assert_eq!(pool.running(), ["after"]);
        assert_eq!(panicked("open", "x").to_string(), "run open: panicked: x");
        drop(release);
    }

    #[test]
    fn a_pool_without_threads_takes_nothing() {
        assert!(Pool::new(0, 8).submit(Job::new("never", || {})).is_err());
        assert!(Pool::new(8, 0).submit(Job::new("never", || {})).is_err());
    }

    #[test]
    fn its_threads_are_not_bound_to_the_processor_of_who_asks() {
        let pool = Arc::new(Pool::new(1, 1));
        let core = Cores::allowed().iter().next();
        let (sender, receiver) = channel();
        let job = Job::new("look", move || sender.send(Cores::allowed()).unwrap());
        let theirs = Arc::clone(&pool);
        let asks = Thread::spawn("asks", core, move |_| theirs.submit(job).unwrap());
        asks.unwrap().join();
        assert_eq!(receiver.recv().unwrap(), Cores::allowed());
    }
}
