use std::net::SocketAddr;
use std::sync::Weak;

use serde_json::{Value, json};
use tenmil_base::ErrorCategory;

use crate::error::{ErrorCode, RpcError};
use crate::event::{EventReceiver, event_channel};
use crate::method::{CallContext, MethodKind};
use crate::methods::TABLE;
use crate::methods::target_configuration::{
    ConfigurationAction, ConfigurationChange, ServedConfiguration, ServedNamespace,
    TargetConfiguration,
};
use crate::target_config::TargetConfig;
use crate::{Arguments, DeferredReplySlot, ProcessParts};

const TEXT: &str = "\
# The target of a test.
[[listener]]
address = \"127.0.0.1:0\"

[[subsystem]]
nqn = \"nqn.2026-01.org.example:a\"
allowed-hosts = [
    \"nqn.2026-01.org.example:one\",   # the first
]

[[subsystem.namespace]]
uri = \"ram:1m\"
";

const A: &str = "nqn.2026-01.org.example:a";

/// A target whose main loop is the test.
struct TestTarget {
    state: ProcessParts,
    configuration: TargetConfiguration,
    events: EventReceiver,
    announcer: crate::EventSender,
    text: String,
}

impl TestTarget {
    fn new() -> Self {
        let (announcer, events) = event_channel().unwrap();
        let configuration = TargetConfiguration::default();
        configuration.set_event_sender(announcer.clone());
        let state = ProcessParts::new().with_part(configuration.clone());
        let mut target = Self { state, configuration, events, announcer, text: String::new() };
        target.publish(TEXT.to_owned());
        target
    }

    fn publish(&mut self, text: String) {
        let config = TargetConfig::parse(&text).unwrap();
        let port =
            |at: usize| SocketAddr::from(([127, 0, 0, 1], 4420 + u16::try_from(at).unwrap()));
        let addresses = (0..config.listeners.len()).map(port).collect();
        let device = Weak::<tenmil_drivers::NullDevice>::new();
        let namespaces = vec![ServedNamespace { nqn: A.to_owned(), nsid: 1, device }];
        self.text = text.clone();
        self.configuration.publish(ServedConfiguration {
            config,
            text,
            file: Some("/etc/target.toml".into()),
            addresses,
            namespaces,
        });
    }

    /// Calls a method, and executes the request that it makes.
    fn call(&mut self, method: &str, parameters: Value) -> Result<Value, RpcError> {
        let method = TABLE.find(method).unwrap();
        let arguments = Arguments::validate(method, parameters.as_object().unwrap())?;
        let later = DeferredReplySlot::for_client("process 7 of uid 0");
        let call = CallContext {
            table: &TABLE,
            state: &self.state,
            arguments: &arguments,
            later: &later,
            passed: &crate::PassedFd::default(),
        };
        let answer = (method.run)(&call)?;
        let Some(pending) = later.take_pending() else {
            assert_eq!(method.answer.check_value(&answer), Ok(()));
            return Ok(answer);
        };
        for request in self.configuration.take_requests() {
            let before = self.configuration.served();
            let before = before.as_deref().unwrap();
            let done = match &request.action {
                ConfigurationAction::Edit(edit) => edit.edit_text(&before.text, &before.addresses),
                other => panic!("{other:?}"),
            };
            let change = done.map(|text| {
                let former = TargetConfig::parse(&self.text).unwrap();
                self.publish(text);
                let now = self.configuration.served().unwrap();
                ConfigurationChange {
                    difference: former.difference_to(&now.config),
                    ..ConfigurationChange::default()
                }
            });
            let after = self.configuration.served();
            let change = change.as_ref().map_err(RpcError::clone);
            request.answer(change, [Some(before), after.as_deref()], Some(&self.announcer));
        }
        let result = pending.take_result().unwrap();
        if let Ok(answer) = &result {
            assert_eq!(method.answer.check_value(answer), Ok(()));
        }
        result
    }

    fn error_of(&mut self, method: &str, parameters: Value) -> String {
        self.call(method, parameters).unwrap_err().message
    }
}

#[test]
fn object_is_created_listed_changed_and_deleted() {
    let mut target = TestTarget::new();
    let created = target
        .call("create_namespace", json!({ "subsystem": A, "uri": "ram:2m", "read_only": true }))
        .unwrap();
    assert_eq!(created["object"]["nsid"], 2, "{created}");
    let row = &target.call("namespaces", json!({ "subsystem": A })).unwrap()[1];
    assert_eq!((&row["uri"], &row["read_only"]), (&json!("ram:2m"), &json!(true)));
    assert_eq!(row["size_bytes"], Value::Null, "its device is gone");
    let host = "nqn.2026-01.org.example:two";
    let named =
        json!({ "subsystem": A, "host": host, "dhchap": ["k"], "read_only_namespaces": ["2"] });
    let created = target.call("create_host", named).unwrap();
    assert_eq!(created["object"]["read_only_namespaces"], json!([2]));
    assert!(
        target.text.contains("# the first\n    { nqn = \"nqn.2026-01.org.example:two\""),
        "{}",
        target.text
    );
    let set = target.call("set_host", json!({ "subsystem": A, "host": host, "read_only": true }));
    assert_eq!(set.unwrap()["object"]["read_only"], true);
    let unset = json!({ "subsystem": A, "host": host, "unset": ["dhchap", "read_only"] });
    target.call("set_host", unset).unwrap();
    assert!(target.text.contains("\n    \"nqn.2026-01.org.example:two\""), "{}", target.text);
    target.call("delete_host", json!({ "subsystem": A, "host": host })).unwrap();
    target.call("delete_namespace", json!({ "subsystem": A, "nsid": 2 })).unwrap();
    assert_eq!(target.text, TEXT, "as it was");
    let created = target.call("create_listener", json!({ "address": "127.0.0.1:4421" })).unwrap();
    assert_eq!(created["object"]["tls"], "off");
    target.call("delete_listener", json!({ "address": "127.0.0.1:4421" })).unwrap();
    let b = "nqn.2026-01.org.example:b";
    target.call("create_subsystem", json!({ "nqn": b })).unwrap();
    let hosts = target.call("hosts", json!({ "subsystem": b })).unwrap();
    assert_eq!(hosts, json!([]), "no host may connect until one is listed");
    let set = target.call("set_subsystem", json!({ "nqn": b, "allow_any_host": true })).unwrap();
    assert_eq!(set["object"]["allow_any_host"], true);
    target.call("delete_subsystem", json!({ "nqn": b })).unwrap();
    assert_eq!(target.text, TEXT, "as it was");
}

#[test]
fn change_is_an_event_with_the_client_and_the_object_before_and_after() {
    let mut target = TestTarget::new();
    target.call("set_namespace", json!({ "subsystem": A, "nsid": 1, "ana_group": 2 })).unwrap();
    let event = target.events.next().unwrap();
    assert_eq!(event.kind.name, "configuration-changed");
    assert_eq!(event.about["client"], "process 7 of uid 0");
    assert_eq!(event.about["before"]["ana_group"], 1);
    assert_eq!(event.about["after"]["ana_group"], 2);
    assert_eq!(event.about["difference"], json!([format!("~ namespace 1 of {A}: ana-group")]));
    target.call("delete_namespace", json!({ "subsystem": A, "nsid": 7 })).unwrap_err();
    let event = target.events.next().unwrap();
    assert_eq!(event.kind.name, "configuration-change-refused");
    assert_eq!(event.about["error"], "delete namespace: no `7`, expected 1");
}

#[test]
fn impossible_change_is_rejected_with_what_was_found_and_expected() {
    let mut target = TestTarget::new();
    for (method, parameters, expected) in [
        (
            "create_subsystem",
            json!({ "nqn": A }),
            "create subsystem: `nqn.2026-01.org.example:a` exists already, expected another NQN",
        ),
        (
            "delete_subsystem",
            json!({ "nqn": "x" }),
            "delete subsystem: no `x`, expected nqn.2026-01.org.example:a",
        ),
        (
            "create_namespace",
            json!({ "subsystem": "x", "uri": "ram:1m" }),
            "create namespace: no `x`, expected nqn",
        ),
        (
            "create_namespace",
            json!({ "subsystem": A, "uri": "ram:1m", "nsid": 1 }),
            "create namespace: `1` exists already, expected another NSID",
        ),
        (
            "set_namespace",
            json!({ "subsystem": A, "nsid": 3 }),
            "set namespace: no `3`, expected 1",
        ),
        (
            "create_host",
            json!({ "subsystem": A, "host": "nqn.2026-01.org.example:one" }),
            "create host: `nqn.2026-01.org.example:one` exists already",
        ),
        (
            "delete_host",
            json!({ "subsystem": A, "host": "y" }),
            "delete host: no `y`, expected nqn.2026-01.org.example:one",
        ),
        (
            "delete_listener",
            json!({ "address": "127.0.0.1:1" }),
            "delete listener: no `127.0.0.1:1`, expected 127.0.0.1:4420",
        ),
        (
            "set_subsystem",
            json!({ "nqn": A, "allow_any_host": true }),
            "set subsystem: nqn.2026-01.org.example:a has hosts, expected none",
        ),
        (
            "set_ana_state",
            json!({ "subsystem": A, "listener": "127.0.0.2:1", "state": "optimized" }),
            "set ana_state: no `127.0.0.2:1`, expected 127.0.0.1:4420",
        ),
    ] {
        let error = target.error_of(method, parameters);
        assert!(error.starts_with(expected), "{method}: {error}");
    }
    assert_eq!(target.text, TEXT);
}

#[test]
fn ana_state_of_a_listener_is_set_by_its_bound_address() {
    let mut target = TestTarget::new();
    let state =
        |state: &str| json!({ "subsystem": A, "listener": "127.0.0.1:4420", "state": state });
    target.call("set_ana_state", state("inaccessible")).unwrap();
    assert!(
        target.text.ends_with(
            "\n[[subsystem.path]]\nlistener = \"127.0.0.1:0\"\nana-state = \"inaccessible\"\n"
        ),
        "{}",
        target.text
    );
    target.call("set_ana_state", state("non-optimized")).unwrap();
    assert_eq!(target.text.matches("[[subsystem.path]]").count(), 1);
    assert_eq!(target.text.matches("\"non-optimized\"").count(), 1);
}

#[test]
fn process_without_a_target_says_so() {
    let mut target = TestTarget::new();
    target.state = ProcessParts::new();
    for method in TABLE.methods().filter(|one| matches!(one.verb, MethodKind::Delete)) {
        let key = |one: &crate::Parameter| {
            let value = if one.name == "nsid" { json!(1) } else { json!("x") };
            (one.name.to_owned(), value)
        };
        let parameters = method.parameters.iter().map(key).collect();
        let error = target.call(&method.request_name(), Value::Object(parameters)).unwrap_err();
        assert_eq!((error.code, error.category), (ErrorCode::NotFound, ErrorCategory::Usage));
    }
}
