//! Nothing that holds a secret prints it.

use core::fmt::Debug;

use super::{Case, run};
use crate::dh::DhJob;
use crate::{
    ChapSecret, Concatenation, ConfiguredPsk, Controller, ControllerConfig, Group, Hash, Host,
    HostConfig, KeyHash, Randomness, SecretBytes, Step, tls_psk_candidates,
};

/// A byte of secrets that nothing else consists of.
const SECRET: u8 = 0xc5;

fn secret_bytes(len: usize) -> SecretBytes {
    SecretBytes::new(vec![SECRET; len])
}

fn secret() -> ChapSecret {
    ChapSecret::generate(KeyHash::None, secret_bytes(32)).unwrap()
}

/// Fails if a form of the secret is in the output: decimal, hexadecimal, base64 or raw.
fn check<T: Debug>(value: &T) {
    for text in [format!("{value:?}"), format!("{value:#?}"), format!("{value:x?}")] {
        let compact: String = text.split_whitespace().collect();
        for form in ["197,197", "c5,c5", "0xc5", "c5c5", "C5C5", "xcXF", "\u{c5}\u{c5}"] {
            assert!(!compact.contains(form), "{form} in {text}");
        }
    }
}

/// Fails if the value of `secret` is in the output.
fn check_without<T: Debug>(value: &T, secret: &SecretBytes) {
    let list = format!("{:?}", secret.expose());
    assert!(!format!("{value:?}").contains(list.trim_matches(['[', ']'])));
}

#[test]
fn debug_output_of_keys_has_no_secret() {
    assert_eq!(format!("{:?}", secret_bytes(32)), "SecretBytes(32 bytes)");
    check(&secret());
    let psk = ConfiguredPsk::generate(KeyHash::None, secret_bytes(32)).unwrap();
    check(&psk);
    let candidates = tls_psk_candidates(&[psk], "h", "s");
    for candidate in &candidates {
        check_without(candidate, &candidate.key);
    }
    check(&candidates);
    // The text form is the one exception; it is overwritten on drop.
    assert!(secret().to_text().contains("xcXF"));
}

#[test]
fn error_messages_have_no_part_of_the_key() {
    let text = secret().to_text();
    for at in 0..text.len() {
        let mut altered = text.to_string();
        altered.replace_range(at..=at, "*");
        let error = ChapSecret::parse(&altered).unwrap_err();
        assert!(!error.to_string().contains("xc") && !format!("{error:?}").contains("xc"));
    }
}

#[test]
fn debug_output_of_jobs_has_no_secret() {
    let job = DhJob::new(Group::Ffdhe2048, secret_bytes(64), true, Some(vec![7]), 1);
    check(&job);
    let result = job.run();
    check_without(&result, result.shared_secret.as_ref().unwrap());
    let random = [SECRET; Randomness::BYTES];
    let sequence = u32::from_be_bytes([SECRET; 4]);
    let text = format!("{:?}", Randomness::new(&random));
    assert!(text.contains(&sequence.to_string()) && !text.contains("197, 197"), "{text}");
}

#[test]
fn debug_output_of_both_ends_has_no_secret_in_any_state() {
    let mut randomness = [0x11; Randomness::BYTES];
    randomness[64..128].fill(SECRET);
    let case = Case {
        hash: Hash::Sha256,
        group: Group::Ffdhe2048,
        bidirectional: true,
        concatenation: Concatenation::NewTlsPsk,
    };
    let host = HostConfig {
        host_secret: secret(),
        controller_secrets: vec![secret()],
        ..case.host_config()
    };
    let controller = ControllerConfig {
        host_secrets: vec![secret()],
        controller_secret: Some(secret()),
        ..case.controller_config()
    };
    check(&host);
    check(&controller);
    let (mut host, mut controller) =
        (Host::new(host).unwrap(), Controller::new(controller).unwrap());
    let mut next = host.start(Randomness::new(&randomness));
    let mut controller_random = randomness;
    controller_random[..64].fill(0x22);
    controller_random[127] = 1;
    for turn in 0.. {
        let is_controller = turn % 2 == 0;
        let mut step = if is_controller {
            controller.handle_message(&next, || Randomness::new(&controller_random))
        } else {
            host.handle_message(&next)
        };
        check(&host);
        check(&controller);
        while let Step::Compute(job) = step {
            check(&job);
            let result = job.run();
            if let Some(secret) = &result.shared_secret {
                check_without(&result, secret);
            }
            let next = if is_controller {
                controller.handle_dh_result(result)
            } else {
                host.handle_dh_result(result)
            };
            step = next.unwrap();
            check(&host);
            check(&controller);
        }
        match step {
            Step::Message(message) => next = message,
            Step::Authenticated { outcome, message } => {
                let psk = outcome.generated_psk.clone().unwrap();
                check_without(&outcome, &psk);
                let tls = outcome.tls_psk("h", "s").unwrap();
                check_without(&tls, &tls.key);
                let Some(message) = message else { return };
                next = message;
            }
            step => panic!("{step:?}"),
        }
    }
}

#[test]
fn failures_name_no_secret() {
    let case = Case {
        hash: Hash::Sha256,
        group: Group::Null,
        bidirectional: false,
        concatenation: Concatenation::None,
    };
    let host = HostConfig { host_secret: secret(), ..case.host_config() };
    let controller = Controller::new(case.controller_config()).unwrap();
    let run = run(&mut (Host::new(host).unwrap(), controller), 1);
    let failure = run.controller_failure().clone();
    check(&failure);
    let error = tenmil_base::Error::from(failure);
    assert_eq!(
        error.to_string(),
        "DH-HMAC-CHAP: authentication failed: the response of the host does not match its secret"
    );
    assert!(error.hint().is_some());
}
