//! Properties of a key as text and JSON. Neither has anything of the secret.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use tenmil_keyring::{Key, KeyKind, KeyName};
use tenmil_nvme_auth::{Derivation, KeyHash, TlsPsk};

/// Lines after a key was stored; `pair` is the host and subsystem whose identities are shown.
pub(super) fn key_report(
    name: &KeyName,
    key: &Key,
    path: &Path,
    pair: Option<(&str, &str)>,
) -> String {
    let mut text = format!(
        "key `{name}`: {}, {} bytes, {}, in {}\n",
        key.kind(),
        key.len_bytes(),
        hash_text(key.hash()),
        path.display()
    );
    text += &identity_lines(key, pair);
    // Writing to a string cannot fail.
    let _ = writeln!(text, "for the other end: `tenmil key export {name}` prints it");
    text
}

/// A line for each identity of a key.
pub(super) fn identity_lines(key: &Key, pair: Option<(&str, &str)>) -> String {
    let lines = identities(key, pair)
        .into_iter()
        .map(|(identity, derivations)| format!("  {identity}  ({})\n", derivations.join(", ")));
    lines.collect()
}

/// A key without its secret.
pub(super) fn key_json(name: &str, key: &Key, path: &Path, pair: Option<(&str, &str)>) -> Value {
    let identity = |(identity, derivations): (String, Vec<&str>)| json!({ "identity": identity, "derivations": derivations });
    let mut value = json!({
        "name": name,
        "kind": key.kind().name(),
        "hash": hash_name(key.hash()),
        "length_bytes": key.len_bytes(),
        "file": path.display().to_string(),
    });
    if pair.is_some() && key.kind() == KeyKind::Psk {
        let identities: Vec<_> = identities(key, pair).into_iter().map(identity).collect();
        value["identities"] = identities.into();
    }
    value
}

/// Name of a hash as an argument.
pub(super) const fn hash_name(hash: KeyHash) -> &'static str {
    match hash {
        KeyHash::None => "none",
        KeyHash::Transform(tenmil_nvme_auth::Hash::Sha256) => "sha256",
        KeyHash::Transform(tenmil_nvme_auth::Hash::Sha384) => "sha384",
        KeyHash::Transform(tenmil_nvme_auth::Hash::Sha512) => "sha512",
    }
}

fn hash_text(hash: KeyHash) -> String {
    match hash.hash() {
        None => "not transformed".to_owned(),
        Some(hash) => format!("transformed with {hash}"),
    }
}

/// Identities of a key for a host and a subsystem, each with the derivations that have it.
fn identities(key: &Key, pair: Option<(&str, &str)>) -> Vec<(String, Vec<&'static str>)> {
    let mut identities: Vec<(String, Vec<_>)> = Vec::new();
    let Some((hostnqn, subsysnqn)) = pair else { return identities };
    for TlsPsk { identity, derivation, .. } in key.tls_psks(hostnqn, subsysnqn) {
        let derivation = derivation_name(derivation);
        match identities.iter_mut().find(|(known, _)| *known == identity) {
            Some((_, derivations)) => derivations.push(derivation),
            None => identities.push((identity, vec![derivation])),
        }
    }
    identities
}

const fn derivation_name(derivation: Derivation) -> &'static str {
    match derivation {
        Derivation::Specification => "specification",
        Derivation::LibnvmeBefore115 => "libnvme before 1.15",
    }
}
