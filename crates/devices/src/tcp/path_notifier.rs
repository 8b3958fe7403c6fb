//! Reporting of path state changes, as log messages and as state that RPC methods return.

use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_nvme_fabrics::{
    DevicePaths, PathAnaState, PathChange, PathCounters, PathEvent, PathSecurity, PathTable,
    TimeoutPolicy,
};
use tenmil_nvme_host::Event;

use super::tcp_uri::TcpUri;

/// Reports path state changes of a device, as log messages and through the RPC interface.
pub(super) struct PathNotifier {
    device: String,
    addresses: Vec<String>,
    /// The rows of the device. `None` for a controller without a block device.
    paths: Option<DevicePaths>,
    policy: TimeoutPolicy,
    /// Whether changes of a single path are logged.
    is_for_operator: bool,
    /// State of the only path.
    only: Mutex<OnlyPath>,
}

/// What is logged of a path besides a sentence.
struct LoggedPath<'a> {
    /// Path index.
    path: Option<usize>,
    /// Its state: an ANA state, `lost`, `restored`, `removed`, `mismatch`, `selected`, `all-paths-down`, or
    /// `controller` for an event of its controller.
    state: &'a str,
    reason: Option<&'a str>,
}

/// What was reported of the only path.
#[derive(Clone, Copy, Debug, Default)]
struct OnlyPath {
    has_been_up: bool,
    disconnected_since: Option<Instant>,
}

/// Paths of all devices of this process, for RPC methods.
static TABLE: LazyLock<PathTable> = LazyLock::new(PathTable::default);

impl PathNotifier {
    /// For the paths of a block device.
    pub(super) fn of_paths(name: &TcpUri, counters: &Arc<PathCounters>) -> Self {
        let mut notifier = Self::of_controller(name);
        let addresses = notifier.addresses.iter().cloned();
        let paths = TABLE.add(notifier.device.clone(), addresses);
        paths.set_counters(Arc::clone(counters));
        notifier.paths = Some(paths);
        notifier
    }

    /// For a controller without a block device.
    pub(super) fn of_controller(name: &TcpUri) -> Self {
        let addresses: Vec<String> = name.addresses().map(str::to_owned).collect();
        let device = name.device();
        // `discover --watch` reports the state of a discovery service itself.
        let is_for_operator = !name.options.is_discovery();
        let (policy, only) = (name.options.policy, Mutex::default());
        Self { device, addresses, paths: None, policy, is_for_operator, only }
    }

    pub(super) fn report(&self, now: Instant, event: &PathEvent) {
        if let PathEvent::Controller { path, event: Event::CommandOverdue { .. } } = event
            && let Some(paths) = &self.paths
        {
            paths.record_timeout(*path);
        }
        match self.addresses.len() {
            1 => self.report_only_path(now, event),
            _ => self.report_path(event),
        }
    }

    /// Reports an event of one of several paths.
    fn report_path(&self, event: &PathEvent) {
        if !event.is_for_operator() {
            return;
        }
        let change = change_of(event);
        if let Some(change) = change {
            self.record_change(change);
        }
        let path = path_of(event);
        let address = path.and_then(|path| self.addresses.get(path));
        let by = address.map_or_else(String::new, |address| format!(" ({address})"));
        let (state, reason) = change.map_or(("controller", None), state_of);
        self.log(LoggedPath { path, state, reason }, format_args!("{event}{by}"));
    }

    /// Reports an event of the only path. That it is up for the first time is not logged.
    fn report_only_path(&self, now: Instant, event: &PathEvent) {
        let mut only = self.only.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            PathEvent::Up { access, .. } => {
                self.record_change(PathChange::Up(0, access.name()));
                if core::mem::replace(&mut only.has_been_up, true) {
                    let since = only.disconnected_since.take().unwrap_or(now);
                    self.notify_restored(now.since(since));
                }
                if *access != PathAnaState::Optimized {
                    self.log_ana_state(*access);
                }
            }
            PathEvent::Down { why, .. } if only.has_been_up => {
                only.disconnected_since.get_or_insert(now);
                self.record_change(PathChange::Lost(0, why));
                self.notify_lost(why);
            }
            PathEvent::Down { why, .. } => self.record_change(PathChange::Lost(0, why)),
            PathEvent::AnaChanged { access, .. } => {
                self.record_change(PathChange::Changed(0, access.name()));
                self.log_ana_state(*access);
            }
            PathEvent::NamespaceMismatch { why, .. } => {
                self.record_change(PathChange::Mismatch(0, why));
                if only.has_been_up {
                    let path = LoggedPath::only("mismatch", Some(why));
                    self.log(path, format_args!("not used: {why}"));
                }
            }
            PathEvent::Removed { why, .. } => {
                self.record_change(PathChange::Lost(0, why));
                self.notify_removed(why);
            }
            // Its loss is reported.
            PathEvent::AllPathsDown => {}
            event => self.report_path(event),
        }
    }

    /// Records the security of a path whose event `Up` is reported next.
    pub(super) fn record_security(&self, path: usize, security: PathSecurity) {
        if let Some(paths) = &self.paths {
            paths.record_security(path, security);
        }
    }

    fn record_change(&self, change: PathChange<'_>) {
        if let Some(paths) = &self.paths {
            paths.record_change(change);
        }
    }

    fn log_ana_state(&self, state: PathAnaState) {
        let path = LoggedPath::only(state.name(), None);
        self.log(path, format_args!("its ANA state is {}", state.name()));
    }

    fn log(&self, path: LoggedPath<'_>, what: fmt::Arguments<'_>) {
        let LoggedPath { path, state, reason } = path;
        let address = path.and_then(|path| self.addresses.get(path)).map(String::as_str);
        tracing::info!(
            cause = %self.device,
            event = "path",
            device = self.device,
            path,
            address,
            state,
            reason,
            "{}: {what}",
            self.device
        );
    }

    /// Reports that the connection was lost for this reason and is being restored.
    pub(super) fn notify_lost(&self, why: &str) {
        if self.is_for_operator {
            let TimeoutPolicy { retry, fail_fast, give_up, .. } = self.policy;
            let path = LoggedPath::only("lost", Some(why));
            self.log(path, format_args!(
                "connection lost ({why}); reconnecting every {retry} for up to {give_up}, and what waits \
                 for it fails after {fail_fast}"
            ));
        }
    }

    /// Reports that the connection was restored after this time.
    pub(super) fn notify_restored(&self, after: Span) {
        if self.is_for_operator {
            let after = round_down_to_ms(after);
            let path = LoggedPath::only("restored", None);
            self.log(path, format_args!("it is there again, after {after}"));
        }
    }

    /// Reports that the controller was given up for this reason.
    pub(super) fn notify_removed(&self, why: &str) {
        if self.is_for_operator {
            let path = LoggedPath::only("removed", Some(why));
            self.log(path, format_args!("removed: {why}"));
        }
    }

    /// Reports an event of the controller.
    pub(super) fn notify_controller_event(&self, event: Event) {
        self.report_path(&PathEvent::Controller { path: 0, event });
    }
}

impl<'a> LoggedPath<'a> {
    /// The only path of a device.
    const fn only(state: &'a str, reason: Option<&'a str>) -> Self {
        Self { path: Some(0), state, reason }
    }
}

/// Rounds down to whole milliseconds.
fn round_down_to_ms(span: Span) -> Span {
    Span::from_ms(span.ns / 1_000_000)
}

fn path_of(event: &PathEvent) -> Option<usize> {
    match event {
        PathEvent::Up { path, .. }
        | PathEvent::Down { path, .. }
        | PathEvent::AnaChanged { path, .. }
        | PathEvent::NamespaceMismatch { path, .. }
        | PathEvent::Controller { path, .. }
        | PathEvent::Failover { to: path, .. } => Some(*path),
        _ => None,
    }
}

fn change_of(event: &PathEvent) -> Option<PathChange<'_>> {
    Some(match event {
        PathEvent::Up { path, access } => PathChange::Up(*path, access.name()),
        PathEvent::Down { path, why } => PathChange::Lost(*path, why),
        PathEvent::AnaChanged { path, access } => PathChange::Changed(*path, access.name()),
        PathEvent::NamespaceMismatch { path, why } => PathChange::Mismatch(*path, why),
        PathEvent::Failover { to, .. } => PathChange::Selected(*to),
        PathEvent::AllPathsDown => PathChange::AllPathsDown,
        _ => return None,
    })
}

/// State after a change, and its reason.
const fn state_of(change: PathChange<'_>) -> (&str, Option<&str>) {
    match change {
        PathChange::Up(_, state) | PathChange::Changed(_, state) => (state, None),
        PathChange::Lost(_, why) => ("lost", Some(why)),
        PathChange::Mismatch(_, why) => ("mismatch", Some(why)),
        PathChange::Selected(_) => ("selected", None),
        PathChange::AllPathsDown => ("all-paths-down", None),
    }
}

/// Paths of all devices of this process.
pub fn paths_of_all() -> &'static PathTable {
    &TABLE
}
