//! The line to a process: a thread that asks it now and then, so that the screen never waits.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use base::Span;
use control::{Client, Code, Refusal};
use host::process::command_line;
use host::runtime_directory::RuntimeDirectory;
use host::{Clock, Stop, Thread};
use serde_json::Value;

use super::ask::{self, PATIENCE};
use super::keys::Wish;
use super::sample::{Sample, refused};
use super::state::{Happened, News, Running};
use crate::Refused;

/// The screen's end of the line. Dropping it ends the thread, which takes as long as one answer.
#[derive(Debug)]
pub(crate) struct Link {
    wishes: SyncSender<Wish>,
    // Dropped before the thread, which may be waiting for room in it.
    news: Receiver<News>,
    _thread: Thread<()>,
}

/// How often the other end looks whether it is wanted.
const GLANCE: Span = Span::from_ms(50);
/// How often it is looked whether somebody has come.
const LOOK_AROUND: Duration = Duration::from_millis(300);
/// The second sample comes soon after the first, because there are no rates before.
const FIRST_INTERVAL: Span = Span::from_ms(250);
/// Events that are taken between two samples; the others are passed over.
const EVENTS_MAX: usize = 64;

impl Link {
    /// Watches `pid`, or whoever runs, and asks every `interval`.
    pub(crate) fn start(
        directory: RuntimeDirectory,
        pid: Option<u32>,
        interval: Span,
    ) -> Result<Self, Refused> {
        let (wishes, wished) = sync_channel(16);
        let (tell, news) = sync_channel(256);
        let clock = Clock::kernel();
        let watcher = Watcher { directory, pid, must_list: false, interval, wished, tell, clock };
        let thread = Thread::spawn("top", None, move |stop| watcher.run(stop))
            .map_err(|error| Refused::machine(format!("start a thread: {error}")))?;
        Ok(Self { wishes, news, _thread: thread })
    }

    /// Asks for something. What does not fit is a key that was pressed too often.
    pub(crate) fn wish(&self, wish: Wish) {
        let _ = self.wishes.try_send(wish);
    }

    /// The next of what has come, if anything has.
    pub(crate) fn news(&self) -> Result<Option<News>, Refused> {
        match self.news.try_recv() {
            Ok(news) => Ok(Some(news)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                Err(Refused::machine("watch: the thread that asks has ended, expected it to last"))
            }
        }
    }
}

/// The other end.
struct Watcher {
    directory: RuntimeDirectory,
    /// Whom to watch; without one, whoever runs.
    pid: Option<u32>,
    /// Somebody wants to choose, even from one.
    must_list: bool,
    interval: Span,
    wished: Receiver<Wish>,
    tell: SyncSender<News>,
    clock: Clock,
}

/// Why a process is not watched any more: it has gone, another is wanted, or the screen has gone.
struct Over;

impl Watcher {
    fn run(mut self, stop: &Stop) {
        while !stop.is_stopped() {
            match self.find() {
                Ok(Some(mut client)) => drop(self.watch(&mut client, stop)),
                Ok(None) => {
                    let wish = self.wished.recv_timeout(LOOK_AROUND);
                    wish.into_iter().for_each(|wish| self.obey(wish));
                }
                // There is no screen any more.
                Err(Over) => return,
            }
        }
    }

    fn tell(&self, news: News) -> Result<(), Over> {
        self.tell.send(news).map_err(|_| Over)
    }

    fn obey(&mut self, wish: Wish) {
        (self.pid, self.must_list) = match wish {
            Wish::Attach(pid) => (Some(pid), false),
            Wish::List => (None, true),
        };
    }

    /// Looks who runs, and connects to the one that is meant.
    fn find(&self) -> Result<Option<Client>, Over> {
        let running = match self.directory.listening() {
            Ok(running) => running,
            Err(error) => {
                let path = self.directory.path().display();
                let why = format!("look into {path}: {error}");
                return self.tell(News::Silent(why)).map(|()| None);
            }
        };
        let pid = match (self.pid, running.as_slice()) {
            (Some(pid), running) => running.contains(&pid).then_some(pid),
            (None, [pid]) if !self.must_list => Some(*pid),
            (None, _) => None,
        };
        let Some(pid) = pid else {
            let listed = running.iter().filter(|_| self.pid.is_none()).map(|pid| described(*pid));
            return self.tell(News::Running(listed.collect())).map(|()| None);
        };
        match self.attach(pid) {
            Ok((client, news)) => self.tell(news).map(|()| Some(client)),
            Err(refused) => self.tell(News::Silent(refused.text)).map(|()| None),
        }
    }

    fn attach(&self, pid: u32) -> Result<(Client, News), Refused> {
        let path = self.directory.socket_of(pid);
        let mut client = Client::connect(&path, PATIENCE).map_err(refused)?;
        let process = ask::process(&mut client)?;
        // One that has no events to tell is watched all the same.
        let _ = ask::call(&mut client, "events");
        Ok((client, News::Attached(process)))
    }

    /// Asks again and again.
    fn watch(&mut self, client: &mut Client, stop: &Stop) -> Result<(), Over> {
        let mut interval = self.interval.min(FIRST_INTERVAL);
        while !stop.is_stopped() {
            let next = self.clock.now().after(interval);
            match self.look(client) {
                Ok(news) => self.tell(news)?,
                Err(refusal) => self.lose(refusal)?,
            }
            let mut events_left = EVENTS_MAX;
            while self.clock.now() < next && !stop.is_stopped() {
                if let Ok(wish) = self.wished.try_recv() {
                    self.obey(wish);
                    return Err(Over);
                }
                let wait = GLANCE.min(next.since(self.clock.now()));
                match client.next_event(wait) {
                    Ok(Some(event)) if events_left > 0 => {
                        events_left -= 1;
                        self.tell(News::Happened(happened(&event)))?;
                    }
                    Ok(_) => {}
                    Err(refusal) => self.lose(refusal)?,
                }
            }
            interval = self.interval;
        }
        Ok(())
    }

    fn look(&self, client: &mut Client) -> Result<News, Refusal> {
        let sample = match ask::call(client, "sample") {
            // One that runs no reactors now may run some later.
            Err(refusal) if refusal.code == Code::Absent => {
                Sample { at_ns: self.clock.now().ns, ..Sample::default() }
            }
            answer => match ask::sample(answer?) {
                Ok(sample) => sample,
                Err(refused) => return Ok(News::Silent(refused.text)),
            },
        };
        Ok(News::Looked { sample, policy: ask::policy(client)? })
    }

    /// Says that there was no answer. If there will be none either, this one is over.
    fn lose(&self, refusal: Refusal) -> Result<(), Over> {
        match refusal.code {
            Code::Gone | Code::NotJson | Code::NoProcess => {
                self.tell(News::Gone(refusal.message))?;
                Err(Over)
            }
            _ => self.tell(News::Silent(refusal.message)),
        }
    }
}

fn described(pid: u32) -> Running {
    let command_line = command_line(pid).unwrap_or_default().join(" ");
    Running { pid, command_line }
}

fn happened(event: &Value) -> Happened {
    let text = |name: &str| event[name].as_str().unwrap_or("-").to_owned();
    Happened { kind: text("kind"), text: text("text") }
}

#[cfg(test)]
mod tests {
    use base::Span;
    use control::{Event, EventKind, Process, Server, State, TABLE, announcements};
    use host::Clock;
    use host::runtime_directory::RuntimeDirectory;

    use super::Link;
    use crate::top::keys::Wish;
    use crate::top::state::News;

    struct World {
        _root: tempfile::TempDir,
        directory: RuntimeDirectory,
    }

    impl World {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let directory = RuntimeDirectory::at(root.path().join("tenmil")).unwrap();
            Self { _root: root, directory }
        }

        fn serve(&self, pid: u32) -> (Server, control::Announcer) {
            let (announcer, announced) = announcements().unwrap();
            let state = State::new().with(Process { version: "9.9.9", log: None });
            let server = Server::start(&self.directory, pid, &TABLE, state, announced).unwrap();
            (server, announcer)
        }

        fn link(&self, pid: Option<u32>) -> Link {
            Link::start(self.directory.clone(), pid, Span::from_ms(20)).unwrap()
        }
    }

    /// Waits for news of a kind, with a limit.
    fn wait_for(link: &Link, what: &str, is_it: impl Fn(&News) -> bool) -> News {
        let clock = Clock::kernel();
        let end = clock.now().after(Span::from_secs(30));
        while clock.now() < end {
            match link.news().unwrap() {
                Some(news) if is_it(&news) => return news,
                Some(_) => {}
                None => host::thread::give_way(),
            }
        }
        panic!("no {what}");
    }

    fn attached(link: &Link) {
        wait_for(link, "connection", |news| matches!(news, News::Attached(_)));
    }

    #[test]
    fn the_only_process_is_watched_and_one_without_reactors_has_none() {
        let world = World::new();
        let (_server, announcer) = world.serve(7);
        let link = world.link(None);
        attached(&link);
        let news = wait_for(&link, "sample", |news| matches!(news, News::Looked { .. }));
        let News::Looked { sample, policy } = news else { unreachable!() };
        assert_eq!((sample.reactors.len(), policy), (0, None));
        let kind = EventKind { name: "bell", help: "somebody rang" };
        announcer.announce(Event { kind, text: "ding".into(), about: serde_json::json!({}) });
        let news = wait_for(&link, "event", |news| matches!(news, News::Happened(_)));
        let News::Happened(happened) = news else { unreachable!() };
        assert_eq!((happened.kind.as_str(), happened.text.as_str()), ("bell", "ding"));
    }

    #[test]
    fn one_that_goes_is_said_to_have_gone_and_its_successor_is_watched() {
        let world = World::new();
        let link = world.link(None);
        wait_for(&link, "list", |news| *news == News::Running(Vec::new()));
        let first = world.serve(7);
        attached(&link);
        drop(first);
        wait_for(&link, "end", |news| matches!(news, News::Gone(_)));
        let _second = world.serve(8);
        attached(&link);
    }

    #[test]
    fn of_several_one_is_chosen_and_others_can_be_listed_again() {
        let world = World::new();
        let servers = [world.serve(7), world.serve(8)];
        let link = world.link(None);
        let listed = |count: usize| {
            let is_it = |news: &News| matches!(news, News::Running(all) if all.len() == count);
            wait_for(&link, "list", is_it);
        };
        listed(2);
        link.wish(Wish::Attach(8));
        attached(&link);
        link.wish(Wish::List);
        listed(2);
        drop(servers);
        listed(0);
        let _one = world.serve(9);
        listed(1);
    }

    #[test]
    fn a_process_that_is_named_is_waited_for_by_its_number() {
        let world = World::new();
        let _other = world.serve(8);
        let link = world.link(Some(7));
        wait_for(&link, "list", |news| *news == News::Running(Vec::new()));
        let _server = world.serve(7);
        attached(&link);
    }
}
