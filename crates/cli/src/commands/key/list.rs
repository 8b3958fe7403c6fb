//! `tenmil key list`: keys of the directory, or of the kernel, without their secrets.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::text::escape;
use tenmil_base::{Error, UtcTime};
use tenmil_keyring::{KernelPsks, Keyring, KeyringEntry};

use super::report::{hash_name, identity_lines, key_json};
use super::{KeyringArgument, PairArguments};
use crate::commands::pool::align_columns;

/// Arguments of `key list`.
#[derive(Debug, Args)]
pub(super) struct ListArguments {
    #[command(flatten)]
    pair: PairArguments,

    /// List the TLS PSKs in the kernel's keyring `.nvme`
    #[arg(long, conflicts_with_all = ["keyring", "hostnqn", "subsysnqn"])]
    kernel: bool,

    #[command(flatten)]
    keyring: KeyringArgument,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const DAY_S: u64 = 86_400;

/// Text and exit code: 1 if a file is no key, or others can access it.
pub(super) fn list_keys(it: &ListArguments) -> Result<(String, ExitCode), Error> {
    if it.kernel {
        return Ok((kernel_list(it.json)?, ExitCode::SUCCESS));
    }
    let keyring = Keyring::open(it.keyring.keyring.as_deref())?;
    let entries = keyring.entries()?;
    let code = ExitCode::from(u8::from(entries.iter().any(|entry| entry.key.is_err())));
    let now = tenmil_linux::clock::utc_now();
    let pair = it.pair.names();
    if it.json {
        let keys: Vec<_> =
            entries.iter().map(|entry| entry_json(entry, &keyring, pair, now)).collect();
        let directory = keyring.path().display().to_string();
        return Ok((format!("{:#}\n", json!({ "keyring": directory, "keys": keys })), code));
    }
    if entries.is_empty() {
        return Ok((format!("{}: no keys\n", keyring.path().display()), code));
    }
    Ok((entries_text(&entries, pair, now), code))
}

/// A row for each key, and below it its identities. Files that are no keys follow with the reason.
fn entries_text(entries: &[KeyringEntry], pair: Option<(&str, &str)>, now: UtcTime) -> String {
    let mut rows = vec![["name", "kind", "hash", "bytes", "age"].map(String::from)];
    let mut below = vec![String::new()];
    let mut unusable = String::new();
    for KeyringEntry { name, key, modified } in entries {
        match key {
            Ok(key) => {
                rows.push([
                    name.clone(),
                    key.kind().name().to_owned(),
                    hash_name(key.hash()).to_owned(),
                    key.len_bytes().to_string(),
                    age_s(*modified, now).map_or_else(String::new, age_text),
                ]);
                below.push(identity_lines(key, pair));
            }
            Err(why) => {
                let hint = why.hint().map_or_else(String::new, |hint| format!("; fix: {hint}"));
                unusable += &format!("unusable: {}: {why}{hint}\n", escape(name));
            }
        }
    }
    let rows = align_columns(&rows);
    let rows = rows.lines().zip(below).map(|(row, below)| format!("{row}\n{below}"));
    rows.collect::<String>() + &unusable
}

fn entry_json(
    entry: &KeyringEntry,
    keyring: &Keyring,
    pair: Option<(&str, &str)>,
    now: UtcTime,
) -> Value {
    let path = keyring.path().join(&entry.name);
    match &entry.key {
        Ok(key) => {
            let mut value = key_json(&entry.name, key, &path, pair);
            value["modified"] = entry.modified.map(|time| time.to_string()).into();
            value["age_s"] = age_s(entry.modified, now).into();
            value
        }
        Err(why) => json!({
            "name": entry.name,
            "file": path.display().to_string(),
            "unusable": why.to_string(),
            "hint": why.hint(),
        }),
    }
}

fn age_s(modified: Option<UtcTime>, now: UtcTime) -> Option<u64> {
    Some(now.unix_us.saturating_sub(modified?.unix_us) / 1_000_000)
}

fn age_text(age_s: u64) -> String {
    match age_s {
        0..60 => format!("{age_s} s"),
        60..3600 => format!("{} min", age_s / 60),
        3600..DAY_S => format!("{} h", age_s / 3600),
        _ => format!("{} d", age_s / DAY_S),
    }
}

fn kernel_list(is_json: bool) -> Result<String, Error> {
    let psks = KernelPsks::open()?.psks()?;
    if is_json {
        let psk = |psk: &tenmil_keyring::KernelPsk| json!({ "identity": psk.identity(), "serial": psk.serial() });
        let psks: Vec<_> = psks.iter().map(psk).collect();
        return Ok(format!("{:#}\n", json!({ "keyring": ".nvme", "psks": psks })));
    }
    if psks.is_empty() {
        return Ok("keyring .nvme of the kernel: no TLS PSKs\n".to_owned());
    }
    let line = |psk: &tenmil_keyring::KernelPsk| {
        format!("{:08x}  {}\n", psk.serial().cast_unsigned(), escape(psk.identity()))
    };
    Ok(psks.iter().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::age_text;

    #[test]
    fn age_has_the_largest_unit_that_fits() {
        for (age_s, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (3599, "59 min"),
            (3600, "1 h"),
            (86_399, "23 h"),
            (86_400, "1 d"),
            (86_400 * 400, "400 d"),
        ] {
            assert_eq!(age_text(age_s), text);
        }
    }
}
