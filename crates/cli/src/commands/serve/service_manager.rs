//! The service manager of a server, systemd: readiness, status, watchdog and passed sockets.
//!
//! ```text
//!   connect ── sockets adopted ── … ── ready ── serves: keep_alive ── reload ── … ── stopping
//! ```
//!
//! A process has one service manager, so the functions here need no handle. Without a manager they do nothing.
//! Nothing here runs on a reactor.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tenmil_base::{Error, Instant};
use tenmil_linux::notify::ServiceManager;
use tenmil_linux::passed_sockets::{adopt_passed_sockets, unused_passed_sockets};
use tenmil_reactor::{ProgressCheck, Reactors};
use tenmil_rpc::EventSender;

use crate::commands::control_options::reload_credentials;
use crate::commands::write_stdout;

/// Connection to the service manager, and the state of the watchdog.
struct ManagedService {
    manager: ServiceManager,
    progress: ProgressCheck,
    /// Time of the next notification of the watchdog.
    keep_alive_at: Instant,
    /// What the service has reported last.
    status: String,
}

static SERVICE: Mutex<Option<ManagedService>> = Mutex::new(None);

/// Connects to the service manager and adopts the sockets that it has passed.
pub(super) fn connect() -> Result<(), Error> {
    adopt_passed_sockets().map_err(|why| {
        Error::environment(why).with_hint("change the socket unit: `systemctl cat tenmil.socket`")
    })?;
    let manager = ServiceManager::from_environment().map_err(|error| {
        Error::environment(format!("connect to the service manager at $NOTIFY_SOCKET: {error}"))
    })?;
    *lock_service() = manager.map(|manager| ManagedService {
        manager,
        progress: ProgressCheck::default(),
        keep_alive_at: Instant::default(),
        status: String::new(),
    });
    Ok(())
}

/// Prints the ready message, and reports to the manager that the server has started.
pub(super) fn announce_ready(out: &mut dyn Write, message: &str) -> Result<(), Error> {
    for (address, name) in unused_passed_sockets() {
        tracing::warn!(
            "the service manager has passed the socket {address} ({name}), and no listener has this address, \
             expected one: its clients connect and get no response"
        );
    }
    write_stdout(out, message)?;
    report(|service| {
        service.status = format!("listening at {}", listen_addresses(message));
        service.manager.report_ready(&service.status)
    });
    Ok(())
}

/// Notifies the watchdog of the manager, twice in its time, if every reactor makes progress. So does the thread
/// that calls this.
pub(super) fn keep_alive(reactors: &Reactors) {
    let now = reactors.clock().now();
    report(|service| {
        let Some(watchdog) = service.manager.watchdog() else { return Ok(()) };
        if now < service.keep_alive_at {
            return Ok(());
        }
        let half = tenmil_base::Span { ns: watchdog.ns / 2 };
        service.keep_alive_at = now.after(half);
        match service.progress.find_stalled_reactor(reactors.registry()) {
            None => service.manager.keep_alive(),
            Some(stalled) => {
                let running = stalled.running.as_deref().unwrap_or("nothing that is known");
                tracing::error!(
                    event = "watchdog",
                    reactor = stalled.reactor.0,
                    running,
                    "reactor {} has not completed an iteration for {half}; it runs {running}; the service \
                     manager is not notified and will restart this process",
                    stalled.reactor.0
                );
                Ok(())
            }
        }
    });
}

/// Runs `reload`, which reads the configuration again, and reports its begin and its result to the manager.
/// `result` describes what came of it, if it has failed.
pub(super) fn report_reload<T>(
    reload: impl FnOnce() -> T,
    failure: impl FnOnce(&T) -> Option<String>,
) -> T {
    report(|service| service.manager.report_reloading("reading the configuration again"));
    let done = reload();
    report(|service| {
        let status = match failure(&done) {
            None => service.status.clone(),
            Some(why) => format!("{}; the last reload changed nothing: {why}", service.status),
        };
        service.manager.report_ready(&status)
    });
    done
}

/// Executes a reload that was requested by SIGHUP, of a server that has only the credentials of the control API
/// to read again. The manager waits for it.
pub(super) fn reload_on_request(announcer: Option<&EventSender>) {
    if tenmil_linux::signal::take_reload_request() {
        report_reload(|| reload_credentials(announcer), |()| None);
    }
}

/// Reports to the manager that the server ends.
pub(super) fn report_stopping() {
    report(|service| service.manager.report_stopping("draining connections"));
}

/// Calls `notify` with the service, if it has a manager. A notification that fails is logged.
fn report(notify: impl FnOnce(&mut ManagedService) -> io::Result<()>) {
    let mut service = lock_service();
    let Some(service) = service.as_mut() else { return };
    if let Err(error) = notify(service) {
        tracing::warn!("notify the service manager at $NOTIFY_SOCKET: {error}");
    }
}

fn lock_service() -> MutexGuard<'static, Option<ManagedService>> {
    SERVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The addresses of a ready message: `ready tcp://…`, or the member `listen` of its JSON.
fn listen_addresses(message: &str) -> String {
    if let Ok(object) = serde_json::from_str::<Value>(message) {
        let addresses = object["listen"].as_array().into_iter().flatten();
        let addresses: Vec<&str> = addresses.filter_map(Value::as_str).collect();
        return addresses.join(" ");
    }
    // The lines after the first tell people how to connect.
    let first = message.lines().next().unwrap_or_default();
    first.trim_start_matches("ready").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::listen_addresses;

    #[test]
    fn status_has_the_addresses_of_the_ready_message() {
        let addresses = "tcp://127.0.0.1:4420 tcp://[::1]:4420";
        let message = format!("ready {addresses}\nnamespace 1 of nqn.x: ram:1m\n");
        assert_eq!(listen_addresses(&message), addresses);
        let json = r#"{"ready":true,"listen":["nbd:/run/a","nbd://127.0.0.1:10809"]}"#;
        assert_eq!(listen_addresses(json), "nbd:/run/a nbd://127.0.0.1:10809");
    }
}
