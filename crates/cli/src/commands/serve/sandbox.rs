//! Rights of a server: the user that it runs as, and what it drops once it serves.
//!
//! ```text
//!   open devices, bind ports ─ create files ─ run_as_user ─ control socket ─ drop_rights ─ ready
//! ```
//!
//! What a server keeps follows from its transport, its devices and what it has open:
//!
//! | right | kept |
//! |---|---|
//! | paths | open files and devices, state directory, keyring, directories of certificates and tokens, runtime directory; `/proc`, `/sys` for reading |
//! | | all but the system's directories, where devices can be added while it serves |
//! | TCP ports | new ones for NVMe/TCP; connections if there are remote devices or an OpenTelemetry collector |
//! | capabilities | CAP_SYS_ADMIN for ublk; others if an option needs them |

use std::path::{Path, PathBuf};

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_linux::MachineEnvironment;
use tenmil_linux::kernel_keyring::{self, KernelKeyring};
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::sandbox::{
    self, AllowedCalls, CallGroup, CapabilitySet, Measure, NetworkRules, PathAccess, PathRule,
    SandboxPlan, SandboxReport, ServiceUser, SocketFamilies,
};
use tenmil_nvme_auth::KERNEL_KEYRING;
use tenmil_rpc::{EventSender, GroupStoreUri};

use super::ServeArguments;
use super::transport::ServeTransport;
use tenmil_linux::open_files::{OpenFile, open_files};

/// What `--sandbox` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SandboxMode {
    /// Rights are dropped.
    On,
    /// Nothing is dropped.
    Off,
    /// Nothing is denied; the kernel logs the system calls that would be.
    Report,
}

/// What a server consists of, as far as its rights depend on it.
pub(super) struct ServedParts<'a> {
    pub(super) transport: ServeTransport,
    /// Configured devices.
    pub(super) uris: Vec<&'a Uri>,
    /// Socket files, which it removes at the end.
    pub(super) socket_files: Vec<&'a Path>,
    /// TCP ports that it listens at.
    pub(super) ports: Vec<u16>,
    /// State directory.
    pub(super) state: Option<&'a Path>,
    /// Directory of the keys, which are read again when the configuration is.
    pub(super) keyring: Option<PathBuf>,
    /// Whether the configuration may have keys of the kernel's keyring.
    pub(super) may_read_kernel_keys: bool,
    /// Store of its gateway group.
    pub(super) group_store: Option<&'a GroupStoreUri>,
    /// Files that are read again on SIGHUP. They may be replaced by then, also by links to other ones.
    pub(super) read_again: Vec<&'a Path>,
}

impl<'a> ServedParts<'a> {
    /// Of a server with socket files only.
    pub(super) fn at_sockets(
        transport: ServeTransport,
        uris: Vec<&'a Uri>,
        socket_files: Vec<&'a Path>,
    ) -> Self {
        // Devices have their keys looked up again when these are refused.
        let needs_keys = uris.iter().any(|uri| names_keys(uri));
        let keyring =
            tenmil_keyring::default_path().ok().filter(|path| needs_keys && path.is_dir());
        Self {
            transport,
            uris,
            socket_files,
            ports: Vec::new(),
            state: None,
            keyring,
            may_read_kernel_keys: false,
            group_store: None,
            read_again: Vec::new(),
        }
    }

    /// Whether keys of the kernel's keyring may be used, now or after a reload.
    fn may_have_kernel_keys(&self) -> bool {
        let names_kernel = |uri: &&Uri| key_names(uri).iter().any(|name| name == KERNEL_KEYRING);
        self.may_read_kernel_keys || self.uris.iter().any(names_kernel)
    }
}

/// Ports below this one need CAP_NET_BIND_SERVICE (`net.ipv4.ip_unprivileged_port_start`).
const UNPRIVILEGED_PORT: u16 = 1024;
/// What the C library reads to resolve host names, and the libraries that it loads for that.
const RESOLVER_PATHS: [&str; 13] = [
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
];
/// Read by every server: its own statistics and the machine's.
const KERNEL_PATHS: [&str; 3] = ["/proc", "/sys", "/etc/machine-id"];
/// Opened again at the end, to delete the disk.
const UBLK_CONTROL: &str = "/dev/ublk-control";
/// Configuration and keyrings of Ceph, which are read for each new connection.
const CEPH_PATH: &str = "/etc/ceph";
/// Opened again when an SSD is attached again after a reset.
const VFIO_PATHS: [&str; 2] = ["/dev/vfio", "/dev/iommu"];
const FREQUENCY_PATH: &str = "/sys/devices/system/cpu";
/// Directories of the system, in which no disks are: they stay closed unless a device lies in them.
const SYSTEM_DIRECTORIES: [&str; 12] = [
    "/bin",
    "/boot",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/lost+found",
    "/proc",
    "/root",
    "/sbin",
    "/sys",
    "/usr",
];
/// Closed to a server of root, which would reach the files of all users, as are the homes in it.
const HOME_DIRECTORY: &str = "/home";

/// Looks up `--user`, and checks that this process may switch to it. Files that are created from now on
/// are given to that user.
pub(super) fn check_user(arguments: &ServeArguments) -> Result<(), Error> {
    let Some(text) = &arguments.user else { return Ok(()) };
    let user =
        ServiceUser::find(text).map_err(|why| Error::usage(format!("--user {text}: {why}")))?;
    let current = tenmil_linux::runtime_directory::current_uid();
    if current != 0 {
        return Err(Error::usage(format!(
            "--user {text}: this process runs as uid {current}, expected root, which may switch users"
        ))
        .with_hint("start it as that user, without --user"));
    }
    if arguments.governor {
        let text =
            format!("--user {text} with --governor, expected one: only root scales frequencies");
        return Err(Error::usage(text));
    }
    sandbox::intend_user(user);
    // For the keyring that `run_as_user` holds. A kernel without keyrings has none to hold.
    let _ = kernel_keyring::join_new_session();
    Ok(())
}

/// Switches all threads to the user of `--user`, if there is one. Devices are open and ports are bound by
/// now.
pub(super) fn run_as_user(
    arguments: &ServeArguments,
    parts: &ServedParts<'_>,
) -> Result<(), Error> {
    let Some(text) = &arguments.user else { return Ok(()) };
    let user =
        ServiceUser::find(text).map_err(|why| Error::usage(format!("--user {text}: {why}")))?;
    let given = parts.socket_files.iter().try_for_each(|path| {
        sandbox::give_path_to_service_user(path).map_err(|errno| {
            Error::environment(format!("give {} to {text}: {errno}", path.display()))
        })
    });
    given?;
    if parts.may_have_kernel_keys() {
        hold_kernel_keyring(text);
    }
    raise_memory_lock_limit();
    sandbox::switch_user(&user, kept_capabilities(arguments, parts, &[]))
        .map_err(Error::environment)?;
    if arguments.exit_with_parent {
        // The kernel cancels it when the user changes (PR_SET_PDEATHSIG).
        tenmil_linux::signal::end_with_parent()
            .map_err(|error| Error::environment(format!("end with the parent process: {error}")))?;
    }
    for file in open_files().iter().filter(|file| !file.can_be_reopened()) {
        tracing::warn!(
            cause = %file.path.display(),
            "{}: user {} may not open it, so write errors are reported to one client only; \
             `chown {} {}` allows it",
            file.path.display(), user.name, user.name, file.path.display()
        );
    }
    Ok(())
}

/// Keeps the keyring of the kernel's NVMe keys open to this process, whose next user could not find it when the
/// configuration is read again.
fn hold_kernel_keyring(user: &str) {
    // Where no module has created one, none of its keys is served.
    let Ok(keyring) = KernelKeyring::find(KERNEL_KEYRING) else { return };
    if let Err(why) = keyring.hold() {
        tracing::warn!(
            cause = %why,
            "{KERNEL_KEYRING}: user {user} may not read it, so a reload will not find its keys: {why}"
        );
    }
}

/// Drops the rights that the server does not need from now on, and logs what it dropped and what it
/// could not.
pub(super) fn drop_rights(
    arguments: &ServeArguments,
    parts: &ServedParts<'_>,
    announcer: Option<&EventSender>,
) {
    if arguments.sandbox == SandboxMode::Off {
        return;
    }
    raise_memory_lock_limit();
    let report = sandbox::restrict(&sandbox_plan(arguments, parts));
    tracing::info!("{}", summary_text(report));
    for obstacle in report.obstacles() {
        tracing::warn!(cause = %obstacle, "sandbox: not available: {obstacle}");
    }
    if report.kernel_threads > 0 {
        tracing::info!(
            "sandbox: kernel threads of io_uring that keep the rights of the start: {}",
            report.kernel_threads
        );
    }
    if let Some(announcer) = announcer {
        announcer.emit_sandbox_event(report, summary_text(report));
    }
}

/// Logs the system calls that the filter has denied since the last time.
pub(super) fn log_denied_calls(announcer: Option<&EventSender>) {
    for denied in sandbox::new_denied_calls() {
        tracing::warn!(
            cause = %denied.name,
            "sandbox: denied system call {} ({} times); --sandbox=off allows it, please report it",
            denied.name, denied.count
        );
        if let Some(announcer) = announcer {
            announcer.emit_denied_call(&denied);
        }
    }
}

/// Whether this process runs with fewer rights than it was started with.
pub(super) fn has_dropped_rights() -> bool {
    sandbox::report().is_some_and(|report| report.dropped_capabilities != Measure::OnlyReported)
}

fn summary_text(report: &SandboxReport) -> String {
    let capabilities = match report.dropped_capabilities {
        Measure::InForce => format!("capabilities: {}", report.capabilities),
        _ => "capabilities: as at start".to_owned(),
    };
    let calls = match report.seccomp {
        Measure::InForce => format!("{} system calls allowed", report.calls.names().len()),
        Measure::OnlyReported => "system calls reported to the kernel log".to_owned(),
        Measure::Unavailable(_) => "system calls not restricted".to_owned(),
    };
    let paths = match report.landlock {
        Measure::InForce => format!("{} paths allowed", report.paths.len()),
        _ => "paths not restricted".to_owned(),
    };
    format!("sandbox: {capabilities}; {calls}; {paths}")
}

fn sandbox_plan(arguments: &ServeArguments, parts: &ServedParts<'_>) -> SandboxPlan {
    let files = open_files();
    let adds_devices = can_add_devices(arguments, parts);
    let is_remote = |uri: &&Uri| has_scheme(uri, &["tcp", "rbd"]);
    let has_remote_devices = adds_devices
        || parts.uris.iter().any(is_remote)
        || !tenmil_devices::tcp::paths_of_all().rows().is_empty();
    let listens_on_ports = parts.transport == ServeTransport::NvmeTcp || !parts.ports.is_empty();
    let has_pci_devices = parts.uris.iter().any(|uri| has_scheme(uri, &["pcie"]));
    let mut groups =
        vec![CallGroup::Process, CallGroup::Files, CallGroup::Events, CallGroup::Sockets];
    if MachineEnvironment::read().io_uring.is_ok() {
        groups.push(CallGroup::IoUring);
    }
    if parts.may_have_kernel_keys() {
        groups.push(CallGroup::KernelKeys);
    }
    // The collector is connected again for each export.
    let connects = has_remote_devices || arguments.control.has_collector();
    let inet = listens_on_ports || connects;
    SandboxPlan {
        calls: AllowedCalls {
            groups,
            families: SocketFamilies { inet, netlink: inet || has_pci_devices },
        },
        kept: kept_capabilities(arguments, parts, &files),
        paths: path_rules(arguments, parts, &files, has_remote_devices),
        network: NetworkRules {
            // Listeners can be added while it serves.
            denies_bind: arguments.config.is_none() && parts.transport != ServeTransport::NvmeTcp,
            denies_connect: !connects,
        },
        only_reports: arguments.sandbox == SandboxMode::Report,
    }
}

/// Whether devices can be added while the server runs: by a new configuration file, or to a pool or
/// mirror.
fn can_add_devices(arguments: &ServeArguments, parts: &ServedParts<'_>) -> bool {
    arguments.config.is_some()
        || parts.uris.iter().any(|uri| has_scheme(uri, &["volume", "mirror"]))
}

/// Whether the device or one below it is of one of these types.
fn has_scheme(uri: &Uri, schemes: &[&str]) -> bool {
    schemes.contains(&uri.scheme()) || uri.children().iter().any(|below| has_scheme(below, schemes))
}

/// Capabilities without which the server could not do what it is configured to do.
fn kept_capabilities(
    arguments: &ServeArguments,
    parts: &ServedParts<'_>,
    files: &[OpenFile],
) -> CapabilitySet {
    let mut kept = CapabilitySet::NONE;
    if parts.transport == ServeTransport::Ublk {
        // The driver checks it for each control command, also for those at the end.
        kept = kept.union(CapabilitySet::SYS_ADMIN);
    }
    let is_privileged = |port: &u16| (1..UNPRIVILEGED_PORT).contains(port);
    if arguments.config.is_some() && parts.ports.iter().any(is_privileged) {
        kept = kept.union(CapabilitySet::NET_BIND_SERVICE);
    }
    let needs_admin =
        |word: &String| word.starts_with("busy-poll=") || word.starts_with("congestion-control=");
    if arguments.socket.iter().any(needs_admin) {
        kept = kept.union(CapabilitySet::NET_ADMIN);
    }
    if arguments.user.is_none() && files.iter().any(OpenFile::belongs_to_another_user) {
        // Each channel opens its files once more, for its own write errors.
        kept = kept.union(CapabilitySet::DAC_OVERRIDE);
    }
    if !has_unlimited_memory_lock() {
        kept = kept.union(CapabilitySet::IPC_LOCK);
    }
    kept
}

fn path_rules(
    arguments: &ServeArguments,
    parts: &ServedParts<'_>,
    files: &[OpenFile],
    resolves_names: bool,
) -> Vec<PathRule> {
    let mut rules = Vec::new();
    let mut add = |path: &Path, access| {
        // A link may lead elsewhere later.
        let path = path.canonicalize().unwrap_or_else(|_| path.into());
        rules.push(PathRule { path, access });
    };
    KERNEL_PATHS.iter().for_each(|path| add(Path::new(path), PathAccess::Read));
    if resolves_names {
        RESOLVER_PATHS.iter().for_each(|path| add(Path::new(path), PathAccess::Read));
    }
    if parts.transport == ServeTransport::Ublk {
        add(Path::new(UBLK_CONTROL), PathAccess::ReadWrite);
    }
    if parts.uris.iter().any(|uri| has_scheme(uri, &["pcie"])) {
        VFIO_PATHS.iter().for_each(|path| add(Path::new(path), PathAccess::ReadWrite));
    }
    if arguments.governor {
        add(Path::new(FREQUENCY_PATH), PathAccess::ReadWrite);
    }
    if let Some(file) = &arguments.config {
        // A live change replaces the file, or what its link leads to, by a new one. Writing there would also
        // permit devices there, so it needs to be listed if anything is.
        let access = match arguments.sandbox_path.is_empty() {
            true => PathAccess::ReadWrite,
            false => PathAccess::Read,
        };
        let files = [Some(file.clone()), file.canonicalize().ok()];
        let directories = files.iter().flatten().filter_map(|file| parent_directory(file));
        directories.for_each(|directory| add(&directory, access));
    }
    if let Ok(directory) = RuntimeDirectory::of_user() {
        add(directory.path(), PathAccess::ReadWrite);
    }
    parts.state.iter().for_each(|path| add(path, PathAccess::ReadWrite));
    parts.keyring.iter().for_each(|path| add(path, PathAccess::Read));
    let control = arguments.control.or_from_environment();
    for path in parts.read_again.iter().copied().chain(control.credential_files()) {
        // A renewed certificate is a new file beside the former one, or beside what its link leads to.
        let directories = [Some(path.to_owned()), path.canonicalize().ok()];
        let directories =
            directories.into_iter().flatten().filter_map(|file| parent_directory(&file));
        directories.for_each(|directory| add(&directory, PathAccess::Read));
    }
    let sockets = parts.socket_files.iter().copied().chain(control.socket_path());
    let removed = sockets.filter_map(parent_directory);
    removed.for_each(|directory| add(&directory, PathAccess::Remove));
    for file in files {
        add(&file.path, if file.is_writable { PathAccess::ReadWrite } else { PathAccess::Read });
    }
    if can_add_devices(arguments, parts) && arguments.sandbox_path.is_empty() {
        let is_root = tenmil_linux::runtime_directory::current_uid() == 0;
        device_directories(is_root).iter().for_each(|path| add(path, PathAccess::ReadWrite));
        let directories = files.iter().filter(|file| file.is_writable);
        let directories = directories.filter_map(|file| file.path.parent());
        let open = directories.filter(|path| !is_closed_directory(path, is_root));
        open.for_each(|path| add(path, PathAccess::ReadWrite));
    }
    ceph_directories(parts).iter().for_each(|path| add(path, PathAccess::Read));
    let keys = parts.uris.iter().flat_map(|uri| key_files(uri));
    keys.for_each(|path| add(&path, PathAccess::Read));
    arguments.sandbox_path.iter().for_each(|path| add(path, PathAccess::ReadWrite));
    core_directory().iter().for_each(|path| add(path, PathAccess::ReadWrite));
    rules.sort_unstable();
    rules.dedup();
    rules
}

/// Directories below the root in which devices may lie that are added later.
fn device_directories(is_root: bool) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir("/") else { return Vec::new() };
    let resolved = entries.flatten().filter_map(|entry| entry.path().canonicalize().ok());
    // A link may lead into a system directory.
    let is_system =
        |path: &Path| SYSTEM_DIRECTORIES.iter().any(|directory| path.starts_with(directory));
    resolved
        .filter(|path| path.is_dir() && !is_system(path) && !is_closed_directory(path, is_root))
        .collect()
}

/// Whether a directory stays closed although a device lies directly in it.
fn is_closed_directory(path: &Path, is_root: bool) -> bool {
    let home = Path::new(HOME_DIRECTORY);
    path == Path::new("/")
        || SYSTEM_DIRECTORIES.iter().any(|directory| path == Path::new(directory))
        || is_root && (path == home || path.parent() == Some(home))
}

fn parent_directory(path: &Path) -> Option<PathBuf> {
    std::path::absolute(path).ok()?.parent().map(Path::to_path_buf)
}

/// Whether a device, or one below it, names a key.
pub(super) fn names_keys(uri: &Uri) -> bool {
    !key_names(uri).is_empty()
}

/// Names of the keys of a device and of those below it.
fn key_names(uri: &Uri) -> Vec<String> {
    let mut options = uri.options();
    let values = ["key", "dhchap", "dhchap-controller"].map(|option| options.text_value(option));
    let values = values.into_iter().flatten();
    let mut names: Vec<_> =
        values.flat_map(|names| names.split(',').map(str::to_owned).collect::<Vec<_>>()).collect();
    names.extend(uri.children().iter().flat_map(key_names));
    names
}

/// Key files of a device and of those below it.
fn key_files(uri: &Uri) -> Vec<PathBuf> {
    let own = uri.options().text_value("key-file").map(PathBuf::from);
    own.into_iter().chain(uri.children().iter().flat_map(key_files)).collect()
}

/// Directories with the configuration of the Ceph clusters of the devices and of the store of the gateway group.
fn ceph_directories(parts: &ServedParts<'_>) -> Vec<PathBuf> {
    let store = match parts.group_store {
        Some(GroupStoreUri::Rados(uri)) => Some(uri.conf().map(PathBuf::from)),
        _ => None,
    };
    let named = parts.uris.iter().flat_map(|uri| ceph_files(uri)).chain(store);
    let named: Vec<Option<PathBuf>> = named.collect();
    if named.is_empty() {
        return Vec::new();
    }
    let directories = named.iter().flatten().filter_map(|file| parent_directory(file));
    directories.chain([PathBuf::from(CEPH_PATH)]).collect()
}

/// Configuration file of Ceph of each image of a device and of those below it, if one is named.
fn ceph_files(uri: &Uri) -> Vec<Option<PathBuf>> {
    let own = (uri.scheme() == "rbd").then(|| uri.options().text_value("conf").map(PathBuf::from));
    own.into_iter().chain(uri.children().iter().flat_map(ceph_files)).collect()
}

/// Directory into which the kernel writes core dumps of this process, if it writes files and the process
/// may have them (core(5)). The kernel opens them with the rights of the process.
fn core_directory() -> Option<PathBuf> {
    let files = tenmil_linux::kernel_files::KernelFiles::live_system();
    let pattern = files.read_trimmed("proc/sys/kernel/core_pattern")?;
    if pattern.starts_with(['|', '@']) || !tenmil_linux::process_stats::may_dump_core() {
        return None;
    }
    let here = std::env::current_dir().ok()?;
    here.join(pattern).parent().map(Path::to_path_buf)
}

/// Registered buffers count as locked memory, without a limit for root. The limit is raised instead of
/// keeping CAP_IPC_LOCK.
fn raise_memory_lock_limit() {
    let own = sandbox::thread_capabilities().unwrap_or_default();
    if own.effective.contains(CapabilitySet::IPC_LOCK) {
        // Where the limit cannot be raised, the capability is kept.
        let _ = tenmil_linux::process_stats::lift_memory_lock_limit();
    }
}

fn has_unlimited_memory_lock() -> bool {
    MachineEnvironment::read().lockable_bytes.is_none()
}

impl SandboxMode {
    /// All modes with their words.
    pub(super) const ALL: [(&'static str, Self); 3] =
        [("on", Self::On), ("off", Self::Off), ("report", Self::Report)];
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        ceph_files, device_directories, has_scheme, is_closed_directory, key_files, key_names,
    };

    #[test]
    fn system_directories_stay_closed_although_a_device_lies_in_them() {
        for path in ["/", "/etc", "/usr", "/root", "/home", "/home/user"] {
            assert!(is_closed_directory(Path::new(path), true), "{path}");
        }
        for path in ["/srv", "/srv/disks", "/dev", "/home/user/disks", "/root/disks", "/etc/disks"]
        {
            assert!(!is_closed_directory(Path::new(path), true), "{path}");
        }
        assert!(!is_closed_directory(Path::new("/home/user"), false));
        let open = device_directories(true);
        assert!(open.iter().any(|path| path == Path::new("/dev")), "{open:?}");
        for path in ["/etc", "/usr/bin", "/usr/lib", "/proc", "/root", "/home"] {
            let found = open.iter().find(|open| Path::new(path).starts_with(open));
            assert_eq!(found, None, "{path}");
        }
    }

    #[test]
    fn configuration_of_ceph_is_found_below_other_devices() {
        let uri = "mirror:[crypt:[rbd:p/i?conf=/c/ceph.conf]],[rbd:p/j],[ram:1m]".parse().unwrap();
        assert_eq!(ceph_files(&uri), [Some("/c/ceph.conf".into()), None]);
    }

    #[test]
    fn devices_below_others_count() {
        let uri = "volume:[crypt:[tcp://host/nqn/1]?key-file=/etc/key]/db".parse().unwrap();
        assert!(has_scheme(&uri, &["tcp"]) && has_scheme(&uri, &["volume"]));
        assert!(!has_scheme(&uri, &["pcie", "file"]));
        assert_eq!(key_files(&uri), [Path::new("/etc/key")]);
        assert_eq!(key_names(&uri), Vec::<String>::new());
        let text = "mirror:[tcp://a/n/1?key=.nvme,db&dhchap=host],[tcp://b/n/1?dhchap=host&dhchap-controller=c]";
        let uri = text.parse().unwrap();
        assert_eq!(key_names(&uri), [".nvme", "db", "host", "host", "c"]);
    }
}
