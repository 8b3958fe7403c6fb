//! `tenmil key insert`, and `remove --kernel`: TLS PSKs in the kernel's keyring.

use clap::Args;
use serde_json::json;
use tenmil_base::Error;
use tenmil_base::text::escape;
use tenmil_keyring::{KernelPsks, KeyName, Keyring};
use tenmil_nvme_auth::{Derivation, IdentityVersion, tls_psk};

use super::{KeyringArgument, parse_hostnqn, parse_subsysnqn};

/// Arguments of `key insert`.
#[derive(Debug, Args)]
pub(super) struct InsertArguments {
    /// Name of the key
    #[arg(value_name = "NAME")]
    name: String,

    /// Host NQN
    #[arg(long, value_name = "NQN", value_parser = parse_hostnqn)]
    hostnqn: String,

    /// Subsystem NQN
    #[arg(long, value_name = "NQN", value_parser = parse_subsysnqn)]
    subsysnqn: String,

    /// Version of the identity: 1, or 0 for peers without version 1, such as SPDK
    #[arg(long, value_name = "VERSION", default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=1))]
    identity: u8,

    /// Derive as libnvme before 1.15 does, for a peer with such a libnvme
    #[arg(long)]
    compat: bool,

    #[command(flatten)]
    keyring: KeyringArgument,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Inserts the TLS PSK of a key for a host and a subsystem.
pub(super) fn insert_into_kernel(it: &InsertArguments) -> Result<String, Error> {
    let name: KeyName = it.name.parse()?;
    let key = Keyring::open(it.keyring.keyring.as_deref())?.psk(&name)?;
    let version = if it.identity == 0 { IdentityVersion::Zero } else { IdentityVersion::One };
    let derivation =
        if it.compat { Derivation::LibnvmeBefore115 } else { Derivation::Specification };
    let psk = tls_psk(&key, version, derivation, &it.hostnqn, &it.subsysnqn)?;
    let inserted = KernelPsks::open()?.insert(&psk)?;
    let (identity, serial) = (inserted.identity(), inserted.serial());
    Ok(match it.json {
        true => format!("{:#}\n", json!({ "identity": identity, "serial": serial })),
        false => format!("keyring .nvme of the kernel: {}\n", escape(identity)),
    })
}

/// Revokes the TLS PSK with an identity. Returns false if there is none and that is permitted.
pub(super) fn revoke_in_kernel(identity: &str, if_exists: bool) -> Result<bool, Error> {
    let psks = KernelPsks::open()?;
    match psks.find(identity)? {
        Some(psk) => {
            psks.revoke(&psk)?;
            Ok(true)
        }
        None if if_exists => Ok(false),
        None => Err(Error::usage(format!(
            "revoke `{}`: keyring .nvme of the kernel has no such identity, expected one of `tenmil key \
             list --kernel`",
            escape(identity)
        ))),
    }
}
