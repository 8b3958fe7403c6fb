//! What happens to the paths of devices, told to people at once and to whoever asks the process.

use std::fmt;
use std::sync::LazyLock;

use base::Span;
use control::{DevicePaths, PathNews, Paths};
use remote::{Access, PathEvent, Policy};

use super::name::TcpName;

/// Tells what happens to the paths of a device: people at once, and whoever asks the process.
pub(super) struct Teller {
    device: String,
    addresses: Vec<String>,
    board: DevicePaths,
    policy: Policy,
    /// Whether people are told of the only path there is.
    is_for_people: bool,
}

/// The paths of all devices of this process, for whoever asks it.
static BOARD: LazyLock<Paths> = LazyLock::new(Paths::default);

impl Teller {
    pub(super) fn new(name: &TcpName) -> Self {
        let addresses: Vec<String> = name.addresses().map(str::to_owned).collect();
        let device = format!("tcp://{}/{}", addresses.join(","), name.options.subsystem);
        let board = BOARD.add(device.clone(), addresses.iter().cloned());
        // Whoever watches a discovery service says himself what becomes of that.
        let is_for_people = !name.options.is_discovery();
        Self { device, addresses, board, policy: name.options.policy, is_for_people }
    }

    pub(super) fn tell(&self, event: &PathEvent) {
        if !event.is_for_people() {
            return;
        }
        if let Some(news) = news_of(event) {
            self.board.tell(news);
        }
        let address = path_of(event).and_then(|path| self.addresses.get(path));
        let by = address.map_or_else(String::new, |address| format!(" ({address})"));
        self.say(format_args!("{event}{by}"));
    }

    fn say(&self, what: fmt::Arguments<'_>) {
        tracing::info!(cause = %self.device, "{}: {what}", self.device);
    }

    /// The only path there is has come up for the first time.
    pub(super) fn tell_only_up(&self) {
        self.board.tell(PathNews::Up(0, Access::Optimized.name()));
    }

    /// The only path there is was lost, for this reason, and is called again.
    pub(super) fn tell_only_away(&self, why: &str) {
        self.board.tell(PathNews::Lost(0, why));
        if self.is_for_people {
            let Policy { retry, fail_fast, give_up, .. } = self.policy;
            self.say(format_args!(
                "it is away: {why}; it is called again every {retry} for {give_up}, and what waits \
                 for it fails after {fail_fast}"
            ));
        }
    }

    /// The only path there is has come back after so long.
    pub(super) fn tell_only_back(&self, away: Span) {
        self.tell_only_up();
        if self.is_for_people {
            self.say(format_args!("it is there again, after {}", in_ms(away)));
        }
    }

    /// The only path there is was given up, for this reason.
    pub(super) fn tell_only_gone(&self, why: &str) {
        self.board.tell(PathNews::Lost(0, why));
        if self.is_for_people {
            self.say(format_args!("it is gone: {why}"));
        }
    }

    /// The controller of the only path there is has said something.
    pub(super) fn tell_of_controller(&self, event: nvme::Event) {
        self.tell(&PathEvent::Controller { path: 0, event });
    }
}

/// As long as that, in whole milliseconds.
fn in_ms(span: Span) -> Span {
    Span::from_ms(span.ns / 1_000_000)
}

fn path_of(event: &PathEvent) -> Option<usize> {
    match event {
        PathEvent::Up { path, .. }
        | PathEvent::Down { path, .. }
        | PathEvent::Access { path, .. }
        | PathEvent::Unfit { path, .. }
        | PathEvent::Controller { path, .. }
        | PathEvent::Failover { to: path, .. } => Some(*path),
        _ => None,
    }
}

fn news_of(event: &PathEvent) -> Option<PathNews<'_>> {
    Some(match event {
        PathEvent::Up { path, access } => PathNews::Up(*path, access.name()),
        PathEvent::Down { path, why } => PathNews::Lost(*path, why),
        PathEvent::Access { path, access } => PathNews::Changed(*path, access.name()),
        PathEvent::Unfit { path, why } => PathNews::Unfit(*path, why),
        PathEvent::Failover { to, .. } => PathNews::Taken(*to),
        PathEvent::NoPath => PathNews::None,
        _ => return None,
    })
}

/// The paths of all devices of this process.
pub(crate) fn paths_of_all() -> &'static Paths {
    &BOARD
}
