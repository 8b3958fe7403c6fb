//! The command `openssl` as a reference: primes, Diffie-Hellman, HMAC, HKDF, and both responses of
//! an exchange. Skipped where it is not installed.
#![allow(clippy::disallowed_methods, reason = "openssl reads keys from files")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{CONTROLLER_SECRET, HOST_SECRET};
use super::{Case, HOST_NQN, SUBSYSTEM_NQN, hex, random_bytes, run, secret};
use crate::dh::DhJob;
use crate::{
    Concatenation, ConfiguredPsk, Derivation, Group, Hash, IdentityVersion, SecretBytes, tls_psk,
};

fn is_installed() -> bool {
    let version = Command::new("openssl").arg("version").output();
    let installed = version.is_ok_and(|version| version.stdout.starts_with(b"OpenSSL 3"));
    if !installed {
        eprintln!("skipped: openssl 3 is not installed");
    }
    installed
}

fn openssl(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("openssl");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const fn digest_name(hash: Hash) -> &'static str {
    match hash {
        Hash::Sha256 => "SHA256",
        Hash::Sha384 => "SHA384",
        Hash::Sha512 => "SHA512",
    }
}

fn hmac(hash: Hash, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let (digest, key) = (format!("-{}", digest_name(hash)), format!("hexkey:{}", to_hex(key)));
    let arguments = ["dgst", &digest, "-mac", "HMAC", "-macopt", &key, "-binary"];
    openssl(&arguments, &parts.concat())
}

fn kdf(hash: Hash, len: usize, options: &[String], name: &str) -> Vec<u8> {
    let (len, digest) = (len.to_string(), format!("digest:{}", digest_name(hash)));
    let mut arguments = vec!["kdf", "-binary", "-keylen", &len, "-kdfopt", &digest];
    for option in options {
        arguments.extend(["-kdfopt", option]);
    }
    arguments.push(name);
    openssl(&arguments, &[])
}

fn expand_label(hash: Hash, secret: &[u8], label: &str, context: &[u8], len: usize) -> Vec<u8> {
    let salt = format!("hexsalt:{}", "00".repeat(hash.len_bytes()));
    let key = format!("hexkey:{}", to_hex(secret));
    let extract = ["mode:EXTRACT_ONLY".to_owned(), salt, key];
    let key = kdf(hash, hash.len_bytes(), &extract, "HKDF");
    let expand = [
        "mode:EXPAND_ONLY".to_owned(),
        format!("hexkey:{}", to_hex(&key)),
        "prefix:tls13 ".to_owned(),
        format!("label:{label}"),
        format!("hexdata:{}", to_hex(context)),
    ];
    kdf(hash, len, &expand, "TLS13-KDF")
}

#[test]
fn hmac_and_digest_are_those_of_openssl() {
    if !is_installed() {
        return;
    }
    for hash in Hash::ALL {
        for (key_len, len) in [(32, 0), (48, 1), (64, 300), (200, 64)] {
            let (key, text) = (random_bytes(1, key_len), random_bytes(2, len));
            assert_eq!(hash.hmac(&key, &[&text]).expose(), hmac(hash, &key, &[&text]));
            let digest = format!("-{}", digest_name(hash));
            let expected = openssl(&["dgst", &digest, "-binary"], &text);
            assert_eq!(hash.digest(&text).expose(), expected);
        }
    }
}

/// `TLS13-KDF` of OpenSSL is HKDF-Expand-Label.
#[test]
fn tls_psks_are_those_of_the_hkdf_of_openssl() {
    if !is_installed() {
        return;
    }
    for text in [
        "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
        "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
    ] {
        let configured = ConfiguredPsk::parse(text).unwrap();
        let hash = configured.tls_hash();
        let specified = Derivation::Specification;
        let retained = configured.retained(specified, HOST_NQN).unwrap();
        if let Some(hash) = configured.transform().hash() {
            let plain = text.replace(&format!(":{:02}:", hash.id()), ":00:");
            let plain = ConfiguredPsk::parse(&plain).unwrap();
            let psk = plain.retained(specified, HOST_NQN).unwrap();
            let host = HOST_NQN.as_bytes();
            let expected = expand_label(hash, psk.expose(), "HostNQN", host, psk.len());
            assert_eq!(retained.expose(), expected, "{text}");
        }
        for version in [IdentityVersion::Zero, IdentityVersion::One] {
            let make = |derivation| {
                tls_psk(&configured, version, derivation, HOST_NQN, SUBSYSTEM_NQN).unwrap()
            };
            let psk = make(specified);
            let context = context_of(version, &psk.identity);
            let len = hash.len_bytes();
            let expected = expand_label(hash, retained.expose(), "nvme-tls-psk", &context, len);
            assert_eq!(psk.key.expose(), expected, "{text}");
            let psk = make(Derivation::LibnvmeBefore115);
            let context = context_of(version, &psk.identity);
            let retained = configured.retained(psk.derivation, HOST_NQN).unwrap();
            // The length little-endian, then label and context without theirs.
            let length = u16::try_from(len).unwrap().to_le_bytes();
            let info = [&length[..], b"tls13 nvme-tls-psk", &context].concat();
            let options = [
                "mode:EXTRACT_AND_EXPAND".to_owned(),
                format!("hexsalt:{}", "00".repeat(len)),
                format!("hexkey:{}", to_hex(retained.expose())),
                format!("hexinfo:{}", to_hex(&info)),
            ];
            assert_eq!(psk.key.expose(), kdf(hash, len, &options, "HKDF"), "{text}");
        }
    }
}

/// Context of the TLS PSK: the identity, or its hash and digest.
fn context_of(version: IdentityVersion, identity: &str) -> Vec<u8> {
    match version {
        IdentityVersion::Zero => identity.as_bytes().to_vec(),
        IdentityVersion::One => {
            let (_, digest) = identity.rsplit_once(' ').unwrap();
            format!("{} {digest}", &identity[6..8]).into_bytes()
        }
    }
}

#[test]
fn primes_and_shared_secrets_are_those_of_openssl() {
    if !is_installed() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for group in &Group::ALL[1..] {
        check_group(*group, directory.path());
    }
}

fn check_group(group: Group, directory: &Path) {
    let key = directory.join(format!("{group}.pem"));
    let peer = directory.join(format!("{group}.der"));
    let (key, peer_path) = (key.to_str().unwrap(), peer.to_str().unwrap());
    let option = format!("group:{group}");
    openssl(&["genpkey", "-algorithm", "DH", "-pkeyopt", &option, "-out", key], &[]);
    let mut public = openssl(&["pkey", "-in", key, "-pubout", "-outform", "DER"], &[]);
    let len = group.len_bytes();
    let prime = group.prime();
    assert!(public.windows(len).any(|window| window == prime), "{group}");
    // The public value is the last integer of the structure. Ours replaces it, and needs the same
    // length, so the same first bit.
    let at = public.len() - len;
    let theirs = public[at..].to_vec();
    let ours = (1..)
        .map(|seed| {
            let exponent = SecretBytes::new(random_bytes(seed, 64));
            DhJob::new(group, exponent, true, Some(theirs.clone()), 0).run()
        })
        .find(|result| result.public_value.as_ref().unwrap()[0] >> 7 == theirs[0] >> 7)
        .unwrap();
    public[at..].copy_from_slice(ours.public_value.as_ref().unwrap());
    fs::write(&peer, public).unwrap();
    let derive = ["pkeyutl", "-derive", "-inkey", key, "-peerkey", peer_path, "-peerform", "DER"];
    let shared = openssl(&[&derive[..], &["-pkeyopt", "dh_pad:1"]].concat(), &[]);
    assert_eq!(ours.shared_secret.unwrap().expose(), shared, "{group}");
}

/// All of the exchange but the exponentiation is computed again by OpenSSL, from the messages.
#[test]
fn responses_and_generated_psk_are_those_of_openssl() {
    if !is_installed() {
        return;
    }
    for hash in [Hash::Sha256, Hash::Sha384] {
        let case = Case {
            hash,
            group: Group::Ffdhe2048,
            bidirectional: true,
            concatenation: Concatenation::NewTlsPsk,
        };
        let run = run(&mut case.ends(), 1);
        let (host, _) = run.both_authenticated().unwrap();
        let len = hash.len_bytes();
        let [_, challenge, reply, success, _] = run.messages.as_slice() else { panic!() };
        let (c1, s1) = (&challenge[16..16 + len], &challenge[12..16]);
        let (r1, c2, s2) = (&reply[16..16 + len], &reply[16 + len..16 + 2 * len], &reply[12..16]);
        let transaction = &reply[4..6];
        // Seed 1: the host has the random values of 2, the controller those of 3.
        let exponent = SecretBytes::new(random_bytes(2, 132)[64..128].to_vec());
        let job = DhJob::new(case.group, exponent, false, Some(challenge[16 + len..].to_vec()), 0);
        let shared = job.run().shared_secret.unwrap();
        let digest = format!("-{}", digest_name(hash));
        let session_key = openssl(&["dgst", &digest, "-binary"], shared.expose());
        let response = |key: &[u8], challenge, sequence, role: &[u8], own: &str, other: &str| {
            let augmented = hmac(hash, &session_key, &[challenge]);
            let (own, other) = (own.as_bytes(), other.as_bytes());
            hmac(hash, key, &[&augmented, sequence, transaction, &[2], role, own, &[0], other])
        };
        let key_of = |seed, nqn: &str| {
            let bytes = random_bytes(seed, 32);
            let key = hmac(Hash::Sha256, &bytes, &[nqn.as_bytes(), b"NVMe-over-Fabrics"]);
            assert_eq!(secret(seed).response_key(nqn).expose(), key);
            key
        };
        let host_key = key_of(HOST_SECRET, HOST_NQN);
        let controller_key = key_of(CONTROLLER_SECRET, SUBSYSTEM_NQN);
        assert_eq!(r1, response(&host_key, c1, s1, b"HostHost", HOST_NQN, SUBSYSTEM_NQN));
        assert_eq!(
            &success[16..],
            response(&controller_key, c2, s2, b"Controller", SUBSYSTEM_NQN, HOST_NQN)
        );
        let psk = hmac(hash, &session_key, &[c1, c2]);
        assert_eq!(host.generated_psk.as_ref().unwrap().expose(), psk);
    }
    assert_eq!(hex("0aFf"), [10, 255]);
}
