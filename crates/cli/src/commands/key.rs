//! `tenmil key`: generates, imports, exports, lists and removes keys of TLS and DH-HMAC-CHAP.
//!
//! A secret is read from a file or standard input, never from an argument, and printed by `export` only.

mod kernel;
mod list;
mod report;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use tenmil_base::Error;
use tenmil_keyring::{Key, KeyKind, KeyName, Keyring, Overwrite, contains_key_text, key_of_input};
use tenmil_nvme_auth::{Hash, KeyHash};
use tenmil_wire::nqn;

use self::kernel::{InsertArguments, insert_into_kernel, revoke_in_kernel};
use self::list::{ListArguments, list_keys};
use self::report::{key_json, key_report};
use super::write_stdout;

/// Arguments of `key`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct KeyArguments {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Create a random key and store it.
    Generate(GenerateArguments),
    /// Store a key that is read from a file or standard input, never from an argument.
    Import(ImportArguments),
    /// Print a key, for the other end of the connection.
    Export(ExportArguments),
    /// List the keys without their secrets: kind, hash, length, age and TLS identities.
    List(ListArguments),
    /// Insert the TLS PSK of a key for a host and a subsystem into the kernel's keyring `.nvme`, for
    /// `nvme connect --tls` of this machine.
    Insert(InsertArguments),
    /// Remove a key.
    Remove(RemoveArguments),
}

/// The keyring of a command.
#[derive(Debug, Args)]
struct KeyringArgument {
    /// Directory of the keys [default: $TENMIL_KEYRING, else /etc/tenmil/keys for root and
    /// ~/.config/tenmil/keys for other users]
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    keyring: Option<PathBuf>,
}

/// Host and subsystem whose TLS identities are shown.
#[derive(Debug, Args)]
struct PairArguments {
    /// Host NQN, to show the TLS identities of the key
    #[arg(long, value_name = "NQN", requires = "subsysnqn", value_parser = parse_hostnqn)]
    hostnqn: Option<String>,

    /// Subsystem NQN, to show the TLS identities of the key
    #[arg(long, value_name = "NQN", requires = "hostnqn", value_parser = parse_subsysnqn)]
    subsysnqn: Option<String>,
}

/// How a key is stored and reported.
#[derive(Debug, Args)]
struct StoreArguments {
    #[command(flatten)]
    pair: PairArguments,

    /// Replace a key of the same name
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    keyring: KeyringArgument,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct GenerateArguments {
    /// Kind: psk for TLS, dhchap for DH-HMAC-CHAP
    #[arg(value_name = "KIND")]
    kind: KindArgument,

    /// Name of the key, which is that of its file: letters, digits, '.', '_' and '-'
    #[arg(value_name = "NAME")]
    name: String,

    /// Hash by which the key is transformed for a host; for TLS it also selects the cipher suite:
    /// AES-128-GCM with sha256, AES-256-GCM with sha384
    #[arg(long, value_name = "HASH", default_value = "sha256")]
    hash: HashArgument,

    /// Length in bytes: 32, 48, or for dhchap 64 [default: that of the hash]
    #[arg(long, value_name = "BYTES")]
    length: Option<usize>,

    #[command(flatten)]
    store: StoreArguments,
}

#[derive(Debug, Args)]
struct ImportArguments {
    /// Name of the key, which is that of its file: letters, digits, '.', '_' and '-'
    #[arg(value_name = "NAME")]
    name: String,

    /// File with the key, as `nvme gen-tls-key` and `nvme gen-dhchap-key` print it [default: standard
    /// input]
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: Option<OsString>,

    #[command(flatten)]
    store: StoreArguments,
}

#[derive(Debug, Args)]
struct ExportArguments {
    /// Name of the key
    #[arg(value_name = "NAME")]
    name: String,

    /// Print the key although standard output is a terminal, which may record it
    #[arg(long)]
    show: bool,

    #[command(flatten)]
    keyring: KeyringArgument,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct RemoveArguments {
    /// Name of the key; with --kernel its identity, as `tenmil key list --kernel` shows it
    #[arg(value_name = "NAME")]
    name: String,

    /// Revoke a TLS PSK in the kernel's keyring `.nvme`, and leave the directory as it is
    #[arg(long)]
    kernel: bool,

    /// Succeed if the key does not exist, for idempotent scripts
    #[arg(long)]
    if_exists: bool,

    #[command(flatten)]
    keyring: KeyringArgument,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Kind of a key to generate.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum KindArgument {
    /// Pre-shared key of TLS
    Psk,
    /// DH-HMAC-CHAP secret
    Dhchap,
}

/// Hash of a key to generate.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum HashArgument {
    /// Used as it is
    None,
    /// SHA-256
    Sha256,
    /// SHA-384
    Sha384,
    /// SHA-512, for dhchap
    Sha512,
}

const EXAMPLES: &str = "\
Examples:
  tenmil key generate psk db-tls --hash sha384
  tenmil key generate dhchap db-chap --length 48 --hash none
  tenmil key generate psk db-tls --hostnqn nqn.2026-01.example:db --subsysnqn nqn.2026-01.example:a
  tenmil key import db-tls /root/db-tls.key
  nvme gen-dhchap-key --hmac 1 | tenmil key import db-chap
  tenmil key export db-tls > /root/db-tls.key
  tenmil key list
  tenmil key list --hostnqn nqn.2026-01.example:db --subsysnqn nqn.2026-01.example:a
  sudo tenmil key insert db-tls --hostnqn nqn.2026-01.example:db --subsysnqn nqn.2026-01.example:a
  sudo tenmil key list --kernel
  tenmil key remove db-tls

A key is a file of mode 0600 with a line `NVMeTLSkey-1:…` or `DHHC-1:…`, in a directory of mode 0700.
docs/operator/tls-and-authentication.md describes how targets and hosts use keys.";

/// Runs the subcommand in a process that leaves no core dump.
pub(super) fn run_key(arguments: &KeyArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    // The process ends soon, and has keys in buffers that are not protected one by one.
    if let Err(why) = tenmil_linux::secret_memory::forbid_core_dumps() {
        tracing::info!("forbid core dumps: {why}");
    }
    execute_key(arguments, out)
}

fn execute_key(arguments: &KeyArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    tenmil_keyring::protect_secrets();
    let text = match &arguments.command {
        KeyCommand::Generate(it) => generate_key(it)?,
        KeyCommand::Import(it) => import_key(it)?,
        KeyCommand::Export(it) => {
            export_key(it, out)?;
            return Ok(ExitCode::SUCCESS);
        }
        KeyCommand::List(it) => {
            let (text, code) = list_keys(it)?;
            write_stdout(out, &text)?;
            return Ok(code);
        }
        KeyCommand::Insert(it) => insert_into_kernel(it)?,
        KeyCommand::Remove(it) => remove_key(it)?,
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Rejects a command line that holds a key: each user of the machine can read it.
pub(super) fn check_no_key_in_arguments(arguments: &[OsString]) -> Result<(), Error> {
    let holds_key = |argument: &OsString| contains_key_text(&argument.to_string_lossy());
    match arguments.iter().position(holds_key) {
        None => Ok(()),
        Some(at) => Err(Error::usage(format!(
            "argument {at} holds a key, which other users can read in `ps`, expected the name of one"
        ))
        .with_hint(
            "consider this key disclosed and use another; `tenmil key import NAME < FILE` stores one, \
             and commands use its name",
        )),
    }
}

fn generate_key(it: &GenerateArguments) -> Result<String, Error> {
    let name: KeyName = it.name.parse()?;
    let key = Key::generate(it.kind.into(), it.hash.into(), it.length)?;
    store_and_report(&name, &key, &it.store)
}

fn import_key(it: &ImportArguments) -> Result<String, Error> {
    let name: KeyName = it.name.parse()?;
    let key = match it.file.as_deref().filter(|file| *file != "-") {
        Some(file) => {
            let of = format!("read {}", Path::new(file).display());
            let file = std::fs::OpenOptions::new().read(true).open(file);
            let mut file = file.map_err(|error| Error::usage(format!("{of}: {error}")))?;
            key_of_input(&of, &mut file)?
        }
        None => {
            let mut input = io::stdin().lock();
            if input.is_terminal() {
                let text = "read standard input: it is a terminal, which would show the key, expected a \
                            file or a pipe";
                let hint =
                    format!("`tenmil key import {name} FILE`, or `… | tenmil key import {name}`");
                return Err(Error::usage(text).with_hint(hint));
            }
            key_of_input("read standard input", &mut input)?
        }
    };
    store_and_report(&name, &key, &it.store)
}

fn store_and_report(
    name: &KeyName,
    key: &Key,
    arguments: &StoreArguments,
) -> Result<String, Error> {
    let StoreArguments { pair, force, keyring, json } = arguments;
    let keyring = Keyring::open_or_create(keyring.keyring.as_deref())?;
    let overwrite = if *force { Overwrite::Replace } else { Overwrite::Refuse };
    let stored = keyring.store(name, key, overwrite).map_err(Error::from);
    stored.map_err(|error| match error.hint() {
        Some(hint) if !*force => {
            let hint = format!("{hint}: --force");
            error.with_hint(hint)
        }
        _ => error,
    })?;
    let path = keyring.path_of(name);
    Ok(match *json {
        true => format!("{:#}\n", key_json(name.as_str(), key, &path, pair.names())),
        false => key_report(name, key, &path, pair.names()),
    })
}

fn export_key(it: &ExportArguments, out: &mut dyn Write) -> Result<(), Error> {
    let name: KeyName = it.name.parse()?;
    if io::stdout().is_terminal() && !it.show {
        let text = format!(
            "export key `{name}`: standard output is a terminal, expected a file or a pipe"
        );
        let hint = format!("`tenmil key export {name} > FILE`, or --show to print it here");
        return Err(Error::usage(text).with_hint(hint));
    }
    let text = Keyring::open(it.keyring.keyring.as_deref())?.key(&name)?.to_text();
    match it.json {
        // The text has no character that JSON escapes.
        true => {
            write_stdout(out, &format!("{{ \"name\": \"{name}\", \"key\": \""))?;
            write_stdout(out, &text)?;
            write_stdout(out, "\" }\n")
        }
        false => {
            write_stdout(out, &text)?;
            write_stdout(out, "\n")
        }
    }
}

fn remove_key(it: &RemoveArguments) -> Result<String, Error> {
    let is_removed = match it.kernel {
        true => revoke_in_kernel(&it.name, it.if_exists)?,
        false => remove_from_directory(it)?,
    };
    // In JSON, a quote of an identity is escaped.
    Ok(match (it.json, is_removed) {
        (true, changed) => {
            format!("{:#}\n", serde_json::json!({ "name": it.name, "changed": changed }))
        }
        (false, true) => format!("key `{}` is removed\n", it.name),
        (false, false) => format!("there is no key `{}`: nothing was removed\n", it.name),
    })
}

fn remove_from_directory(it: &RemoveArguments) -> Result<bool, Error> {
    let name: KeyName = it.name.parse()?;
    match Keyring::open(it.keyring.keyring.as_deref())?.remove(&name) {
        Ok(()) => Ok(true),
        Err(tenmil_keyring::KeyringError::NotFound { .. }) if it.if_exists => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn parse_hostnqn(text: &str) -> Result<String, String> {
    nqn::check_nqn(text).map(|()| text.to_owned()).map_err(|why| why.to_string())
}

fn parse_subsysnqn(text: &str) -> Result<String, String> {
    nqn::check_nqn(text).map(|()| text.to_owned()).map_err(|why| why.to_string())
}

impl PairArguments {
    /// Names of host and subsystem.
    fn names(&self) -> Option<(&str, &str)> {
        self.hostnqn.as_deref().zip(self.subsysnqn.as_deref())
    }
}

impl From<KindArgument> for KeyKind {
    fn from(kind: KindArgument) -> Self {
        match kind {
            KindArgument::Psk => Self::Psk,
            KindArgument::Dhchap => Self::Dhchap,
        }
    }
}

impl From<HashArgument> for KeyHash {
    fn from(hash: HashArgument) -> Self {
        match hash {
            HashArgument::None => Self::None,
            HashArgument::Sha256 => Self::Transform(Hash::Sha256),
            HashArgument::Sha384 => Self::Transform(Hash::Sha384),
            HashArgument::Sha512 => Self::Transform(Hash::Sha512),
        }
    }
}
