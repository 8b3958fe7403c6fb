//! Dropping the rights that a server does not need once it runs.
//!
//! ```text
//!   root ── opens devices, binds ports ── switch_user ── starts ── restrict ── serves
//!                                         (--user)                 │
//!      each thread: capabilities, no_new_privs, Landlock ◀─────────┤
//!      all threads at once: seccomp filter ◀───────────────────────┘
//! ```
//!
//! | measure | what is left | needs |
//! |---|---|---|
//! | capabilities | those in [`SandboxPlan::kept`], also as the bounding set | nothing; the bounding set CAP_SETPCAP |
//! | no_new_privs | programs that are executed gain nothing | Linux 3.5 |
//! | Landlock | the paths of [`SandboxPlan::paths`], TCP ports by [`SandboxPlan::network`] | Linux 5.13; ports 6.7 |
//! | seccomp | the system calls of [`SandboxPlan::calls`] | Linux 3.17 with CONFIG_SECCOMP_FILTER |
//!
//! A measure that the kernel lacks is left out and reported; the others are taken.
//!
//! Landlock and capabilities also hold for operations in a ring of io_uring, which a seccomp filter does
//! not see. io_uring's own kernel threads keep the rights of the time at which they were started.

mod capabilities;
mod filter_program;
mod landlock;
mod other_threads;
mod seccomp;
mod service_user;
mod system_calls;

use std::path::Path;
use std::sync::OnceLock;

use rustix::io::Errno;

pub use self::capabilities::{CapabilitySet, ThreadCapabilities, thread_capabilities};
use self::filter_program::{
    ARCHITECTURE, FilterAction, FilterRules, FilterVerdict, filter_program,
};
pub use self::landlock::{NetworkRules, PathAccess, PathRule};
use self::landlock::{Ruleset, abi_version, is_permitted};
use self::other_threads::{ThreadJobResult, run_on_other_threads};
pub use self::service_user::{
    ServiceUser, find_group, give_path_to_service_user, give_to_service_user, intend_user,
    service_uid,
};
pub use self::system_calls::{AllowedCalls, CallGroup, SocketFamilies};

/// Rights that a process keeps.
#[derive(Clone, Debug)]
pub struct SandboxPlan {
    /// System calls.
    pub calls: AllowedCalls,
    /// Capabilities, of those that the process has.
    pub kept: CapabilitySet,
    /// Paths that may be opened.
    pub paths: Vec<PathRule>,
    /// Ports that may be used.
    pub network: NetworkRules,
    /// Nothing is denied: the kernel logs the system calls that would be.
    pub only_reports: bool,
}

/// Whether a measure is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Measure {
    /// It is, for all threads.
    InForce,
    /// It is not, since the plan only reports.
    OnlyReported,
    /// It is not, or not for all threads, for this reason.
    Unavailable(String),
}

/// Rights that a process has after [`restrict`].
#[derive(Clone, Debug)]
pub struct SandboxReport {
    /// Capabilities that it has, and that it can have.
    pub capabilities: CapabilitySet,
    /// Whether it has no others.
    pub dropped_capabilities: Measure,
    /// Whether the bounding set is reduced to them.
    pub bounding_set: Measure,
    /// Whether executed programs gain nothing.
    pub no_new_privileges: Measure,
    /// Whether system calls are filtered.
    pub seccomp: Measure,
    /// The allowed calls.
    pub calls: AllowedCalls,
    /// Whether paths are restricted.
    pub landlock: Measure,
    /// Version of the kernel's Landlock interface.
    pub landlock_abi: Option<u32>,
    /// Paths that may be opened: those that existed.
    pub paths: Vec<PathRule>,
    /// Ports, as far as the kernel checks them.
    pub network: NetworkRules,
    /// Threads that were restricted.
    pub threads: usize,
    /// Kernel threads of io_uring that were started before.
    pub kernel_threads: usize,
}

/// Denied system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedCall {
    /// Name.
    pub name: String,
    /// How many times.
    pub count: u32,
}

static REPORT: OnceLock<SandboxReport> = OnceLock::new();

/// Makes all threads run as `user`, with those of the process's capabilities that are in `kept`.
///
/// # Errors
///
/// If the process may not, or if a thread does not respond; the text says which. The process must end
/// then, since its threads differ.
pub fn switch_user(user: &ServiceUser, kept: CapabilitySet) -> Result<(), String> {
    let own = thread_capabilities().map_err(|errno| format!("read capabilities: {errno}"))?;
    let kept = kept.intersection(own.permitted);
    let refuse = |why: String| format!("run as user {}: {why}", user.name);
    let others = service_user::switch_every_thread(user, kept)
        .map_err(|errno| refuse(format!("{errno}, expected to be started by root")))?;
    match others.failed.first() {
        None => Ok(()),
        Some((thread, why)) => Err(refuse(format!("thread {thread}: {why}"))),
    }
}

/// Drops the rights of the process that are not in the plan, on all threads and for good. A measure that
/// is not available is left out and is in the report. A process does this once; a second call returns
/// the first report.
pub fn restrict(plan: &SandboxPlan) -> &'static SandboxReport {
    REPORT.get_or_init(|| match plan.only_reports {
        true => report_only(plan),
        false => restrict_threads(plan),
    })
}

/// The report of [`restrict`], if this process has called it.
pub fn report() -> Option<&'static SandboxReport> {
    REPORT.get()
}

/// System calls that the filter has denied, since the start of the process.
pub fn denied_calls() -> Vec<DeniedCall> {
    named(seccomp::denied_calls())
}

/// System calls that the filter has denied since the last call of this function.
pub fn new_denied_calls() -> Vec<DeniedCall> {
    named(seccomp::new_denied_calls())
}

fn named(calls: Vec<(u32, u32)>) -> Vec<DeniedCall> {
    let name = |(number, count)| DeniedCall { name: system_calls::call_name(number), count };
    calls.into_iter().map(name).collect()
}

/// Why this process cannot open `path` although its permissions may allow it: the sandbox does not
/// permit it.
pub fn denial_of_path(path: &Path, writes: bool) -> Option<String> {
    let report = report()?;
    let access = if writes { PathAccess::ReadWrite } else { PathAccess::Read };
    if report.landlock == Measure::InForce && !is_permitted(&report.paths, path, access) {
        return Some("permission denied by the sandbox of this process".into());
    }
    let lacks_override = !report.capabilities.contains(CapabilitySet::DAC_OVERRIDE);
    (lacks_override && rustix::process::geteuid().is_root())
        .then(|| "permission denied: this process dropped CAP_DAC_OVERRIDE at start".into())
}

/// Makes the named system calls fail with ENOSYS on this thread and in the programs that it executes, as
/// on a kernel that lacks them. For tests of what a program does then.
///
/// # Errors
///
/// If the kernel refuses the filter.
pub fn simulate_missing_calls(numbers: &[libc::c_long]) -> Result<(), Errno> {
    let Some(architecture) = ARCHITECTURE else { return Err(Errno::NOSYS) };
    set_no_new_privileges()?;
    let missing = FilterVerdict::Always(FilterAction::Fail(38));
    let verdict =
        |number: &libc::c_long| (u32::try_from(*number).unwrap_or(u32::MAX), missing.clone());
    let rules = FilterRules {
        frequent: Vec::new(),
        verdicts: numbers.iter().map(verdict).collect(),
        otherwise: FilterAction::Allow,
        foreign: FilterAction::Allow,
    };
    seccomp::install_on_this_thread(&filter_program(&rules, architecture))
}

/// Nothing is denied, but what would be is logged by the kernel.
fn report_only(plan: &SandboxPlan) -> SandboxReport {
    let capabilities = thread_capabilities().unwrap_or_default().permitted;
    let no_new_privileges = measure(set_no_new_privileges(), "set no_new_privs");
    let seccomp = match filter_calls(plan) {
        Measure::InForce => Measure::OnlyReported,
        other => other,
    };
    SandboxReport {
        capabilities,
        dropped_capabilities: Measure::OnlyReported,
        bounding_set: Measure::OnlyReported,
        no_new_privileges,
        seccomp,
        calls: plan.calls.clone(),
        landlock: Measure::OnlyReported,
        landlock_abi: abi_version().ok(),
        paths: plan.paths.clone(),
        network: plan.network,
        threads: 0,
        kernel_threads: 0,
    }
}

fn restrict_threads(plan: &SandboxPlan) -> SandboxReport {
    let own = thread_capabilities().unwrap_or_default();
    let kept = plan.kept.intersection(own.permitted);
    let abi = abi_version();
    let ruleset = abi.map_err(landlock_obstacle).and_then(|abi| {
        Ruleset::new(abi, &plan.paths, plan.network)
            .map_err(|(doing, errno)| format!("{doing}: {errno}"))
    });
    // This thread first: what it cannot do, the others need not try.
    let has_setpcap = own.effective.contains(CapabilitySet::SETPCAP);
    let bounding_set = match has_setpcap {
        true => measure(capabilities::reduce_bounding_set(kept), "reduce the bounding set"),
        false => {
            let _ = capabilities::clear_ambient_set();
            Measure::Unavailable(
                "the process has no CAP_SETPCAP; no_new_privs has the same effect".into(),
            )
        }
    };
    let no_new_privileges = measure(set_no_new_privileges(), "set no_new_privs");
    let (mut landlock, ruleset) = match ruleset {
        Ok(ruleset) => match measure(ruleset.restrict_thread(), "restrict paths") {
            Measure::InForce => (Measure::InForce, Some(ruleset)),
            other => (other, None),
        },
        Err(why) => (Measure::Unavailable(why), None),
    };
    let sets =
        ThreadCapabilities { effective: kept, permitted: kept, inheritable: CapabilitySet::NONE };
    let mut dropped = measure(capabilities::set_thread_capabilities(sets), "drop capabilities");
    let paths = ruleset.as_ref().map(|ruleset| ruleset.paths.clone()).unwrap_or_default();
    let checks_ports = ruleset.as_ref().is_some_and(|ruleset| ruleset.checks_ports);
    let reduces = bounding_set == Measure::InForce;
    let drops = dropped == Measure::InForce;
    let others = run_on_other_threads(Box::new(move || {
        if reduces {
            capabilities::reduce_bounding_set(kept)?;
        } else {
            capabilities::clear_ambient_set()?;
        }
        set_no_new_privileges()?;
        if let Some(ruleset) = &ruleset {
            ruleset.restrict_thread()?;
        }
        if drops { capabilities::set_thread_capabilities(sets) } else { Ok(()) }
    }));
    let others = others.unwrap_or_else(|errno| ThreadJobResult {
        failed: vec![("all but one".into(), format!("install a signal handler: {errno}"))],
        ..ThreadJobResult::default()
    });
    if let Some((thread, why)) = others.failed.first() {
        let text = format!("thread {thread} keeps its rights: {why}");
        for measure in [&mut landlock, &mut dropped] {
            if *measure == Measure::InForce {
                *measure = Measure::Unavailable(text.clone());
            }
        }
    }
    SandboxReport {
        capabilities: thread_capabilities().unwrap_or_default().permitted,
        dropped_capabilities: dropped,
        bounding_set,
        no_new_privileges,
        // Last: the filter denies the calls above.
        seccomp: filter_calls(plan),
        calls: plan.calls.clone(),
        landlock,
        landlock_abi: abi.ok(),
        paths,
        network: if checks_ports { plan.network } else { NetworkRules::default() },
        threads: 1 + others.threads,
        kernel_threads: others.kernel_threads,
    }
}

fn filter_calls(plan: &SandboxPlan) -> Measure {
    let Some(architecture) = ARCHITECTURE else {
        return Measure::Unavailable("there is a filter for x86_64 and aarch64 only".into());
    };
    let program = filter_program(&plan.calls.rules(plan.only_reports), architecture);
    let expected = "filter system calls (expected Linux 3.17 or later with CONFIG_SECCOMP_FILTER)";
    measure(seccomp::install_on_all_threads(&program), expected)
}

fn landlock_obstacle(errno: Errno) -> String {
    match errno {
        Errno::NOSYS => {
            "the kernel has no Landlock, expected Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK"
                .into()
        }
        Errno::OPNOTSUPP => {
            "Landlock is disabled, expected `landlock` in `lsm=` of the kernel command line".into()
        }
        errno => format!("ask for Landlock: {errno}"),
    }
}

fn measure(result: Result<(), Errno>, doing: &str) -> Measure {
    match result {
        Ok(()) => Measure::InForce,
        Err(errno) => Measure::Unavailable(format!("{doing}: {errno}")),
    }
}

/// Async-signal-safe.
fn set_no_new_privileges() -> Result<(), Errno> {
    let numbers = [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0];
    // SAFETY: PR_SET_NO_NEW_PRIVS has numbers as its arguments and reads no memory.
    unsafe { raw_call(libc::SYS_prctl, numbers) }.map(drop)
}

/// Makes a system call. Async-signal-safe; it changes `errno` of the thread.
///
/// # Safety
///
/// Arguments that are addresses must be valid for what the call reads and writes there.
unsafe fn raw_call(number: libc::c_long, arguments: [usize; 5]) -> Result<usize, Errno> {
    let [one, two, three, four, five] = arguments;
    // SAFETY: the caller answers for the arguments.
    let result = unsafe { libc::syscall(number, one, two, three, four, five) };
    match usize::try_from(result) {
        Ok(result) => Ok(result),
        Err(_) => {
            let errno = std::io::Error::last_os_error().raw_os_error();
            Err(errno.map_or(Errno::INVAL, Errno::from_raw_os_error))
        }
    }
}

impl Measure {
    /// Why it is not in force.
    pub fn obstacle(&self) -> Option<&str> {
        match self {
            Self::Unavailable(why) => Some(why),
            Self::InForce | Self::OnlyReported => None,
        }
    }

    /// Word for reports.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::InForce => "in force",
            Self::OnlyReported => "only reported",
            Self::Unavailable(_) => "unavailable",
        }
    }
}

impl SandboxReport {
    /// Measures that are not available, one text each, with the reason.
    pub fn obstacles(&self) -> Vec<String> {
        let measures = [
            ("capabilities", &self.dropped_capabilities),
            ("no_new_privs", &self.no_new_privileges),
            ("Landlock", &self.landlock),
            ("seccomp", &self.seccomp),
        ];
        let text = |(what, measure): (&str, &Measure)| {
            measure.obstacle().map(|why| format!("{what}: {why}"))
        };
        measures.into_iter().filter_map(text).collect()
    }
}
