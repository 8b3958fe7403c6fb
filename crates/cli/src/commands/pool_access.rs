//! Access to a pool: open in this process, or in another process of the same user, which then executes
//! the commands.
//!
//! The process that has the pool open is found through the control sockets. Pools are compared by
//! kernel identities of the files and devices below them, so different spellings of a path match. All
//! processes are queried before the device is opened here, because a device behind a network does not
//! report that another process uses it.

mod snapshot_stream;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tenmil_base::{Error, ErrorCategory, Span};
use tenmil_block::Opener;
use tenmil_drivers::pool::{ChangedRange, OpenPool, VolumeRef, device_key, file_lock_holder};
use tenmil_linux::process_stats::command_line;
use tenmil_linux::running_processes::ListeningProcess;
use tenmil_rpc::pool_commands::{self, CommandResult, DiffPage, JobSpec, JobStream, PoolCommand};
use tenmil_rpc::{ErrorCode, RpcClient, RpcError};

use super::rpc_endpoint::{command_error, process_search};
use super::volume::stream_commands::StreamProgressBar;

/// Access to a pool.
pub(super) enum PoolAccess<'a> {
    /// The pool is open in this process.
    Here {
        /// Open pool.
        open: Arc<OpenPool>,
        /// Opener of its devices.
        opener: &'a Opener<'a>,
    },
    /// The pool is open in another process.
    Remote(PoolOfOtherProcess<'a>),
}

/// Pool that is open in another process.
pub(super) struct PoolOfOtherProcess<'a> {
    pid: u32,
    client: RpcClient,
    /// Device URI of the pool as that process spells it.
    device: String,
    opener: &'a Opener<'a>,
}

/// Time limit for a process to list its pools.
const LOOKUP_TIMEOUT: Span = Span::from_secs(2);
/// Time limit of a command, longer than the pool's own device timeouts.
const COMMAND_TIMEOUT: Span = Span::from_secs(150);
/// Interval at which the progress of a job is polled, and time after which a job that is not polled
/// cancels itself.
const PROGRESS_INTERVAL: Span = Span::from_ms(100);
const ABANDON_TIMEOUT: Span = Span::from_secs(5);

impl<'a> PoolAccess<'a> {
    /// Opens the pool at a location, or connects to the process that has it open.
    ///
    /// # Errors
    ///
    /// If no process has it open and it cannot be opened here, or the process that has it open does not
    /// respond.
    pub(super) fn open_or_connect(
        opener: &'a Opener<'a>,
        place: &VolumeRef,
    ) -> Result<Self, Error> {
        let mut silent = Vec::new();
        match find_owner_process(opener, place, &mut silent) {
            Some(there) => Ok(Self::Remote(there)),
            None => {
                let open = OpenPool::open(opener, place);
                let open = open.map_err(|error| pool_open_error(&error, place, &silent))?;
                // Device identities may differ although the device is the same; the owner recorded in
                // the pool's superblock decides.
                match open
                    .other_local_owner_pid()
                    .and_then(|pid| connect_to_owner(opener, pid, open.uuid()))
                {
                    Some(there) => Ok(Self::Remote(there)),
                    None => Ok(Self::Here { open, opener }),
                }
            }
        }
    }

    /// Runs `here` with a pool that no process has open, or returns access to the process that has it
    /// open.
    ///
    /// # Errors
    ///
    /// If `here` fails, or the process that has the device open does not respond.
    pub(super) fn run_local_or_connect<T>(
        opener: &'a Opener<'a>,
        place: &VolumeRef,
        here: impl FnOnce(&Opener<'_>, &VolumeRef) -> Result<T, Error>,
    ) -> Result<Result<T, Self>, Error> {
        let mut silent = Vec::new();
        if let Some(there) = find_owner_process(opener, place, &mut silent) {
            return Ok(Err(Self::Remote(there)));
        }
        let done = here(opener, place);
        done.map(Ok).map_err(|error| pool_open_error(&error, place, &silent))
    }

    /// Process ID of the other process that has the pool open, if there is one.
    pub(super) fn owner_pid(&self) -> Option<u32> {
        match self {
            Self::Here { .. } => None,
            Self::Remote(there) => Some(there.pid),
        }
    }

    /// Output line that names that process.
    pub(super) fn owner_line(&self) -> String {
        match self {
            Self::Here { .. } => String::new(),
            Self::Remote(there) => {
                format!("by {}, which has the pool open\n", process_text(there.pid))
            }
        }
    }

    /// The process that has the pool open, as part of a sentence.
    pub(super) fn owner_text(&self) -> String {
        let pid = self.owner_pid().unwrap_or_else(std::process::id);
        format!("in {}", process_text(pid))
    }

    /// Opener for further devices.
    const fn device_opener(&self) -> &'a Opener<'a> {
        match self {
            Self::Here { opener, .. } | Self::Remote(PoolOfOtherProcess { opener, .. }) => opener,
        }
    }

    /// Executes a pool command.
    pub(super) fn execute_command(&mut self, order: &PoolCommand) -> Result<CommandResult, Error> {
        match self {
            Self::Here { open, .. } => {
                Ok(pool_commands::execute_command(open, tenmil::KINDS, order)?)
            }
            Self::Remote(there) => there.execute_command(order),
        }
    }

    /// Properties of the pool, as JSON.
    pub(super) fn pool_json(&mut self) -> Result<Value, Error> {
        match self {
            Self::Here { open, .. } => Ok(pool_commands::pool_json(open)?),
            Self::Remote(there) => {
                let found = there.call_method("pools", Map::new())?;
                let is_it = |store: &&Value| store["uri"] == there.device.as_str();
                let store = found.as_array().and_then(|stores| stores.iter().find(is_it));
                store
                    .cloned()
                    .ok_or_else(|| there.unknown_result_error("it has closed the pool meanwhile"))
            }
        }
    }

    /// Properties of its volumes, as JSON.
    pub(super) fn volumes_json(&mut self) -> Result<Value, Error> {
        match self {
            Self::Here { open, .. } => Ok(pool_commands::volumes_json(open)?),
            Self::Remote(there) => {
                let arguments = there.pool_argument();
                there.call_method("volumes", arguments)
            }
        }
    }

    /// Ranges of the volume `to` that differ from `from`.
    pub(super) fn changed_ranges(
        &mut self,
        from: &str,
        to: &str,
    ) -> Result<Vec<ChangedRange>, Error> {
        match self {
            Self::Here { open, .. } => {
                let (from, to, mut changed) =
                    (open.find_volume(from)?, open.find_volume(to)?, Vec::new());
                open.for_each_difference(Some(&from), &to, &mut |range| {
                    changed.push(range);
                    Ok(())
                })?;
                Ok(changed)
            }
            Self::Remote(there) => there.changed_ranges(from, to),
        }
    }

    /// Runs a long job with a progress bar. `None` if the user has interrupted it.
    pub(super) fn run_job(
        &mut self,
        long: &JobSpec,
        phase: &'static str,
    ) -> Result<Option<Value>, Error> {
        let mut progress = StreamProgressBar::new(self.device_opener(), phase);
        let done = match self {
            Self::Here { open, .. } => {
                let done = long.execute_job(open, tenmil::KINDS, JobStream::Nothing, &mut |done| {
                    progress.update(done)
                });
                done.map(Some)
            }
            Self::Remote(there) => there.run_job(long, &mut |done| {
                progress.update(done);
            }),
        };
        progress.end();
        done
    }
}

impl PoolOfOtherProcess<'_> {
    fn execute_command(&mut self, order: &PoolCommand) -> Result<CommandResult, Error> {
        let (method, arguments) =
            pool_commands::request_of_command(&self.device, &order.clone().with_absolute_paths());
        let answer = self.call_method(&method, arguments)?;
        CommandResult::from_json(&answer)
            .ok_or_else(|| self.unknown_result_error("the reply has another type"))
    }

    fn call_method(&mut self, method: &str, arguments: Map<String, Value>) -> Result<Value, Error> {
        self.call_with_files(method, arguments, &[])
    }

    fn call_with_files(
        &mut self,
        method: &str,
        arguments: Map<String, Value>,
        files: &[BorrowedFd<'_>],
    ) -> Result<Value, Error> {
        let answer = self.client.call_with_files(method, arguments, files, COMMAND_TIMEOUT);
        answer.map_err(|refusal| match refusal.code {
            ErrorCode::Timeout | ErrorCode::ConnectionClosed => {
                self.unknown_result_error(&refusal.message)
            }
            _ => command_error(refusal),
        })
    }

    /// Queries the differences page by page.
    fn changed_ranges(&mut self, from: &str, to: &str) -> Result<Vec<ChangedRange>, Error> {
        let (mut changed, mut next, mut uuids) = (Vec::new(), Some(0), None);
        while let Some(at_bytes) = next {
            let mut arguments = self.pool_argument();
            let more = [("from", from.into()), ("to", to.into()), ("at_bytes", at_bytes.into())];
            arguments.extend(more.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
            let answer = self.call_method("volume_diff", arguments)?;
            let portion = DiffPage::from_json(&answer);
            let portion =
                portion.ok_or_else(|| self.unknown_result_error("the reply has another type"))?;
            // Between two pages a volume may be deleted and recreated under the same name.
            if *uuids.get_or_insert_with(|| portion.uuids.clone()) != portion.uuids {
                let text = format!("`{from}` or `{to}` has become another volume meanwhile");
                return Err(self.unknown_result_error(&text));
            }
            changed.extend(portion.changed);
            next = portion.next_bytes;
        }
        Ok(changed)
    }

    fn pool_argument(&self) -> Map<String, Value> {
        Map::from_iter([("pool".to_owned(), Value::from(self.device.as_str()))])
    }

    /// Starts a job in the other process and polls its progress until it ends.
    fn run_job(
        &mut self,
        long: &JobSpec,
        look: &mut dyn FnMut((u64, u64)),
    ) -> Result<Option<Value>, Error> {
        tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
            .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
        let job = self.start_job(long, &[])?;
        self.wait_for_job(job, look)
    }

    /// Starts a job, with the stream descriptor if it has one, and returns its row.
    fn start_job(&mut self, long: &JobSpec, files: &[BorrowedFd<'_>]) -> Result<Value, Error> {
        let long = JobSpec { unheard_max: Some(ABANDON_TIMEOUT), ..long.clone() };
        let (method, arguments) = long.start_request(&self.device);
        self.call_with_files(&method, arguments, files)
    }

    /// Polls a job until it ends. `None` if the user has interrupted it.
    fn wait_for_job(
        &mut self,
        mut job: Value,
        look: &mut dyn FnMut((u64, u64)),
    ) -> Result<Option<Value>, Error> {
        let id = job["id"].clone();
        let mut is_stopped = false;
        loop {
            let bytes = |name: &str| job[name].as_u64().unwrap_or_default();
            look((bytes("done_bytes"), bytes("size_bytes")));
            match job["state"].as_str() {
                Some("running") => tenmil_linux::named_thread::sleep(PROGRESS_INTERVAL),
                Some("done") => return Ok(Some(job["result"].take())),
                // Only a stop requested here is an interruption; a job stopped by others is an error.
                Some("stopped") if is_stopped => {
                    tracing::info!("job {id} of process {} is stopped", self.pid);
                    return Ok(None);
                }
                _ => {
                    let refusal = RpcError::from_json(&job["refusal"]).map(command_error);
                    return Err(refusal
                        .unwrap_or_else(|| self.unknown_result_error("it forgot about the job")));
                }
            }
            if tenmil_linux::signal::is_stop_requested() && !is_stopped {
                is_stopped = true;
                let arguments = json!({ "id": id, "stop": true });
                job = self
                    .call_method("set_job", arguments.as_object().cloned().unwrap_or_default())?;
                continue;
            }
            let mut rows =
                self.call_method("jobs", Map::from_iter([("id".to_owned(), id.clone())]))?;
            job = rows.get_mut(0).map(Value::take).unwrap_or_default();
        }
    }

    /// Error for a command whose result is unknown.
    fn unknown_result_error(&self, why: &str) -> Error {
        let text = format!("{}, which has {} open: {why}", process_text(self.pid), self.device);
        Error::remote(text).with_hint(
            "The command may have been executed; repeat it: a change that is already made is reported as such.",
        )
    }
}

/// `process 4711 (tenmil serve file:/disk)`.
fn process_text(pid: u32) -> String {
    match command_line(pid) {
        Some(words) => {
            let words = words.join(" ");
            let shown: String = words
                .chars()
                .filter(|c| !tenmil_base::text::is_terminal_control(*c))
                .take(80)
                .collect();
            format!("process {pid} ({shown})")
        }
        None => format!("process {pid}"),
    }
}

/// Finds the process that has a pool open. Processes that do not respond are added to `silent`, with
/// the error.
fn find_owner_process<'a>(
    opener: &'a Opener<'a>,
    place: &VolumeRef,
    silent: &mut Vec<(u32, RpcError)>,
) -> Option<PoolOfOtherProcess<'a>> {
    // Without a runtime directory no process listens.
    let search = process_search().ok()?;
    let wanted = device_key(&place.store);
    for ListeningProcess { pid, socket, .. } in search.all_processes().ok()? {
        if pid == std::process::id() {
            continue;
        }
        let asked = RpcClient::connect(&socket, LOOKUP_TIMEOUT).and_then(|mut client| {
            let stores = client.call_method("pools", Map::new(), LOOKUP_TIMEOUT)?;
            Ok((client, stores))
        });
        let (client, stores) = match asked {
            Ok(asked) => asked,
            Err(refusal) => {
                silent.push((pid, refusal));
                continue;
            }
        };
        let is_it = |store: &&Value| store["identity"] == wanted.as_str();
        let found = stores.as_array().and_then(|stores| stores.iter().find(is_it));
        if let Some(device) = found.and_then(|store| store["uri"].as_str()) {
            return Some(PoolOfOtherProcess { pid, client, device: device.to_owned(), opener });
        }
    }
    None
}

/// The pool in the process `pid`, if that process confirms to have it open.
fn connect_to_owner<'a>(
    opener: &'a Opener<'a>,
    pid: u32,
    uuid: u128,
) -> Option<PoolOfOtherProcess<'a>> {
    let owner = process_search().ok()?.find_pid(pid).ok()??;
    let mut client = RpcClient::connect(&owner.socket, LOOKUP_TIMEOUT).ok()?;
    let stores = client.call_method("pools", Map::new(), LOOKUP_TIMEOUT).ok()?;
    let uuid = format!("{uuid:032x}");
    let found = stores.as_array()?.iter().find(|store| store["uuid"] == uuid.as_str())?;
    let device = found["uri"].as_str()?.to_owned();
    Some(PoolOfOtherProcess { pid, client, device, opener })
}

/// Error for a pool that cannot be opened: if a process has its device open, names that process, its
/// RPC error and a fix.
fn pool_open_error(error: &Error, place: &VolumeRef, silent: &[(u32, RpcError)]) -> Error {
    let refused = error.clone();
    let is_hinted = refused.hint.is_some();
    let Some((pid, _)) =
        file_lock_holder(&place.store).filter(|(pid, _)| *pid != std::process::id())
    else {
        return refused;
    };
    if !refused.text.contains(&format!("process {pid}")) || is_hinted {
        return refused;
    }
    match silent.iter().find(|(asked, _)| *asked == pid) {
        Some((_, refusal)) => {
            let text = format!("{}; its reply for the pool: {refusal}", refused.text);
            let hint = format!(
                "See what it does with `tenmil get process --pid {pid}`, or end it: `kill {pid}`."
            );
            Error { text, category: ErrorCategory::Remote, hint: None }.with_hint(hint)
        }
        None => refused.with_hint(format!(
            "Process {pid} has it open, but does not accept commands for this pool: end the process, or its \
             use of the device, and repeat the command."
        )),
    }
}
