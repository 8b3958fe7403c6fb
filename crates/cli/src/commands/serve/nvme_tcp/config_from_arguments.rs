//! Configuration of the NVMe/TCP target from the arguments of `serve`.

use std::net::SocketAddr;

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{QosLimits, RateLimit};
use tenmil_keyring::KeyName;
use tenmil_nvme_auth::KERNEL_KEYRING;
use tenmil_rpc::target_config::{
    self, ExportConfig, HostSecurityConfig, HostsConfig, IgnoredLineNumber, KeyReference,
    NbdConfig, NbdListener, SecurityConfig, TargetConfig,
};
use tenmil_serve::tcp::{ExportLimits, HostRights, PortSecurity};

use super::connection_limits;
use crate::commands::serve::{ServeArguments, TlsArgument};

/// Default subsystem NQN.
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// The configuration that the arguments describe.
pub(in crate::commands::serve) fn config_from_arguments(
    arguments: &ServeArguments,
    listeners: Vec<SocketAddr>,
    clients: &[NbdListener],
) -> Result<TargetConfig, Error> {
    let hosts = match (arguments.allowed_host.is_empty(), arguments.allow_any_host) {
        (false, false) => HostsConfig::Only(arguments.allowed_host.clone()),
        (true, _) => HostsConfig::Any,
        (false, true) => {
            return Err(Error::usage("--allowed-host and --allow-any-host together, expected one"));
        }
    };
    let nqn = arguments.nqn.clone().unwrap_or_else(|| NQN.to_owned());
    let refuse = |option: &str, name: &str, why| Error::usage(format!("{option} `{name}`: {why}"));
    tenmil_wire::nqn::check_nqn(&nqn).map_err(|why| refuse("--nqn", &nqn, why))?;
    for name in &arguments.allowed_host {
        tenmil_wire::nqn::check_nqn(name).map_err(|why| {
            let hint = "the NQN of a Linux host is in /etc/nvme/hostnqn";
            refuse("--allowed-host", name, why).with_hint(hint)
        })?;
    }
    let namespace = |(nsid, uri): (u32, &Uri)| target_config::NamespaceConfig {
        nsid,
        uri: uri.clone(),
        line: IgnoredLineNumber::default(),
        is_read_only: arguments.read_only,
        hosts: HostsConfig::Any,
        ana_group: 1,
        slow_io: arguments.slow_io,
    };
    let security = security_of_arguments(arguments, &hosts)?;
    let subsystem = target_config::SubsystemConfig {
        nqn,
        line: IgnoredLineNumber::default(),
        serial: None,
        hosts,
        security,
        listeners: (0..listeners.len()).collect(),
        namespaces: (1..).zip(&arguments.uris).map(namespace).collect(),
        paths: Vec::new(),
        limits: limits_of_arguments(arguments),
    };
    let listens_for_hosts = !listeners.is_empty();
    let listener = |address| target_config::ListenerConfig {
        address,
        security: arguments.tls.into(),
        networks: Vec::new(),
        line: IgnoredLineNumber::default(),
    };
    let requested = TargetConfig {
        memory_bytes: arguments.buffer_memory.map(std::num::NonZeroU64::get),
        memory_line: IgnoredLineNumber::default(),
        state: arguments.state_dir.clone(),
        state_line: IgnoredLineNumber::default(),
        keyring: arguments.keyring.clone(),
        keyring_line: IgnoredLineNumber::default(),
        group: None,
        discovery: SecurityConfig::default(),
        listeners: listeners.into_iter().map(listener).collect(),
        // Without a listener there is none: the devices are exported over NBD only.
        subsystems: if listens_for_hosts { vec![subsystem] } else { Vec::new() },
        slow_io: arguments.slow_io,
        referrals: Vec::new(),
        limits: connection_limits::limits_of_arguments(arguments),
        nbd: match clients {
            [] => NbdConfig::default(),
            _ => arguments.nbd_tls.config(arguments),
        },
        exports: exports_of_arguments(arguments, clients)?,
    };
    check_unrestricted_subsystems(&requested, arguments.allow_any_host)?;
    Ok(requested)
}

/// Rate limits: of each namespace, for all hosts together.
fn limits_of_arguments(arguments: &ServeArguments) -> ExportLimits {
    let total = RateLimit { iops: arguments.limit_iops, bytes: arguments.limit_bytes };
    let limits = QosLimits { total, ..QosLimits::default() };
    let namespaces = (1..).zip(&arguments.uris).filter(|_| !limits.is_unlimited());
    let namespaces = namespaces.map(|(nsid, _)| (nsid, limits)).collect();
    ExportLimits { namespaces, ..ExportLimits::default() }
}

/// NBD exports of all devices, each at all addresses.
fn exports_of_arguments(
    arguments: &ServeArguments,
    clients: &[NbdListener],
) -> Result<Vec<ExportConfig>, Error> {
    if clients.is_empty() {
        return Ok(Vec::new());
    }
    let uris = &arguments.uris;
    if let (Some(name), [_, _, ..]) = (&arguments.export_name, uris.as_slice()) {
        let text = format!(
            "--export-name {name} with {} devices, expected one device: each export has a name of its own",
            uris.len()
        );
        return Err(
            Error::usage(text).with_hint("without it the names are the URIs; or use --config")
        );
    }
    let total = RateLimit { iops: arguments.limit_iops, bytes: arguments.limit_bytes };
    let export = |uri: &Uri| ExportConfig {
        name: arguments.export_name.clone().unwrap_or_else(|| uri.to_string()),
        uri: uri.clone(),
        line: IgnoredLineNumber::default(),
        is_read_only: arguments.read_only,
        allows_resize: arguments.allow_resize,
        allows_remote_write: arguments.allow_remote_write,
        listeners: clients.to_vec(),
        limits: QosLimits { total, ..QosLimits::default() },
    };
    Ok(uris.iter().map(export).collect())
}

/// Keys of the hosts that are named.
fn security_of_arguments(
    arguments: &ServeArguments,
    hosts: &HostsConfig,
) -> Result<SecurityConfig, Error> {
    let ServeArguments { tls, psk, dhchap, dhchap_controller, .. } = arguments;
    let has_psk = !psk.is_empty();
    match (tls, has_psk) {
        (TlsArgument::Off, true) => {
            return Err(Error::usage("--psk without TLS, expected --tls required or allowed"));
        }
        (TlsArgument::Required, false) => {
            let text = "--tls required without --psk, expected a key: no host could connect";
            let hint = "`tenmil key generate psk NAME` creates one";
            return Err(Error::usage(text).with_hint(hint));
        }
        _ => {}
    }
    if dhchap_controller.is_some() && dhchap.is_empty() {
        let text = "--dhchap-controller without --dhchap, expected both: the controller proves its \
                    identity in answer to an authentication of the host";
        return Err(Error::usage(text));
    }
    let mut security = SecurityConfig::default();
    if !has_psk && dhchap.is_empty() {
        return Ok(security);
    }
    let HostsConfig::Only(names) = hosts else {
        let text = "keys are given without a host, expected --allowed-host NQN: a key is a host's";
        return Err(Error::usage(text));
    };
    let key = |key: &'static str, name: &String| {
        let name = name.parse::<KeyName>()?;
        Ok::<_, Error>(KeyReference { name, line: IgnoredLineNumber::default(), key })
    };
    let keys = |option, names: &[String]| {
        names.iter().map(|name| key(option, name)).collect::<Result<Vec<_>, _>>()
    };
    let is_kernel = |name: &String| name == KERNEL_KEYRING;
    let kernel_psks = psk.iter().any(is_kernel).then(IgnoredLineNumber::default);
    let psk: Vec<_> = psk.iter().filter(|name| !is_kernel(name)).cloned().collect();
    let (dhchap, psk) = (keys("dhchap", dhchap)?, keys("psk", &psk)?);
    let controller = dhchap_controller.as_ref();
    let controller = controller.map(|name| key("dhchap-controller", name)).transpose()?;
    security.authentication_required = !dhchap.is_empty();
    security.hosts = names
        .iter()
        .map(|nqn| HostSecurityConfig {
            nqn: nqn.clone(),
            dhchap: dhchap.clone(),
            dhchap_controller: controller.clone(),
            psk: psk.clone(),
            kernel_psks,
            rights: HostRights::default(),
        })
        .collect();
    Ok(security)
}

impl From<TlsArgument> for PortSecurity {
    fn from(tls: TlsArgument) -> Self {
        match tls {
            TlsArgument::Off => Self::Plaintext,
            TlsArgument::Allowed => Self::TlsAllowed,
            TlsArgument::Required => Self::TlsRequired,
        }
    }
}

/// Rejects listeners beyond loopback for subsystems without allowed hosts, unless any host is
/// explicitly allowed.
fn check_unrestricted_subsystems(requested: &TargetConfig, allows_any: bool) -> Result<(), Error> {
    for subsystem in &requested.subsystems {
        let reached = subsystem.listeners.iter().filter_map(|at| requested.listeners.get(*at));
        let beyond = reached.map(|listener| listener.address).find(|at| !at.ip().is_loopback());
        if let Some(address) = beyond
            && subsystem.hosts == HostsConfig::Any
            && !allows_any
        {
            let text = format!(
                "serve {}: every host that can connect to {address} could read and write it, \
                 expected a list of hosts",
                subsystem.nqn
            );
            let hint = "name them with --allowed-host NQN, or add --allow-any-host";
            return Err(Error { hint: Some(hint.to_owned()), ..Error::usage(text) });
        }
    }
    Ok(())
}
