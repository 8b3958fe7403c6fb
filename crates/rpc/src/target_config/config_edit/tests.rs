//! Edits keep what they do not change, to the byte.

use serde_json::{Value, json};

use super::{ConfigEdit, ConfigObject};
use crate::arguments::Arguments;
use crate::method::MethodKind;
use crate::methods::TABLE;
use crate::target_config::TargetConfig;

const TEXT: &str = "\
# Head of the file.

# The listener of the rack.
[[listener]]
address = \"192.0.2.1:4420\" # of the rack

[[listener]]
address = '127.0.0.1:4420'

# Disks of the database.
[[subsystem]]
nqn = \"nqn.2026-01.org.example:db\"
allowed-hosts = [
    # primary
    \"nqn.2026-01.org.example:one\", # rack 1
    # standby
    { nqn = \"nqn.2026-01.org.example:two\", dhchap = [\"two\"] }, # rack 2
]
listeners = [\"192.0.2.1:4420\", \"127.0.0.1:4420\"]

[[subsystem.namespace]] # log
uri = \"ram:1m\"

# Data.
[[subsystem.namespace]]
uri = \"ram:2m\"
read-only = true # for now

[[subsystem.namespace]]
uri = \"ram:3m\"
allowed-hosts = [\"nqn.2026-01.org.example:one\", \"nqn.2026-01.org.example:two\"]

[[subsystem]]
nqn = \"nqn.2026-01.org.example:open\"
allow-any-host = true
# The end.
";

const DB: &str = "nqn.2026-01.org.example:db";

fn edited(text: &str, kind: MethodKind, object: ConfigObject, parameters: Value) -> String {
    let method = TABLE.methods().find(|it| it.verb == kind && it.name == object.name()).unwrap();
    let arguments = Arguments::validate(method, parameters.as_object().unwrap()).unwrap();
    let text = ConfigEdit { kind, object, arguments }.edit_text(text, &[]);
    let text = text.unwrap_or_else(|refusal| panic!("{refusal}"));
    TargetConfig::parse(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
    text
}

/// The text in which each part is replaced by another one.
fn replaced(pairs: &[(&str, &str)]) -> String {
    pairs.iter().fold(TEXT.to_owned(), |text, (found, by)| {
        assert_eq!(text.matches(found).count(), 1, "{found}");
        text.replace(found, by)
    })
}

#[test]
fn new_objects_stand_behind_those_of_their_kind() {
    use ConfigObject::{Host, Listener, Namespace, Subsystem};
    let text =
        edited(TEXT, MethodKind::Create, Namespace, json!({ "subsystem": DB, "uri": "ram:4m" }));
    let last = "\"nqn.2026-01.org.example:two\"]\n";
    let new = format!("{last}\n[[subsystem.namespace]]\nuri = \"ram:4m\"\nnsid = 4\n");
    assert_eq!(text, replaced(&[(last, &new)]));
    let host = json!({ "subsystem": DB, "host": "nqn.2026-01.org.example:new" });
    let text = edited(TEXT, MethodKind::Create, Host, host);
    let new = "# rack 2\n    \"nqn.2026-01.org.example:new\",\n";
    assert_eq!(text, replaced(&[("# rack 2\n", new)]));
    let text = edited(TEXT, MethodKind::Create, Listener, json!({ "address": "192.0.2.2:4420" }));
    let last = "address = '127.0.0.1:4420'\n";
    let new = format!("{last}\n[[listener]]\naddress = \"192.0.2.2:4420\"\n");
    assert_eq!(text, replaced(&[(last, &new)]));
    let nqn = json!({ "nqn": "nqn.2026-01.org.example:new" });
    let text = edited(TEXT, MethodKind::Create, Subsystem, nqn);
    let new = "allow-any-host = true\n\n[[subsystem]]\nnqn = \"nqn.2026-01.org.example:new\"\nallowed-hosts = []\n";
    assert_eq!(text, replaced(&[("allow-any-host = true\n", new)]));
    let text = edited("", MethodKind::Create, Listener, json!({ "address": "127.0.0.1:1" }));
    assert_eq!(text, "[[listener]]\naddress = \"127.0.0.1:1\"\n");
    let text =
        edited("# Head.\n", MethodKind::Create, Listener, json!({ "address": "127.0.0.1:1" }));
    assert_eq!(text, "# Head.\n\n[[listener]]\naddress = \"127.0.0.1:1\"\n");
}

#[test]
fn deleted_object_goes_with_its_comment_and_no_other() {
    use ConfigObject::{Host, Listener, Namespace, Subsystem};
    let text = edited(TEXT, MethodKind::Delete, Listener, json!({ "address": "192.0.2.1:4420" }));
    let table =
        "# The listener of the rack.\n[[listener]]\naddress = \"192.0.2.1:4420\" # of the rack\n\n";
    assert_eq!(
        text,
        replaced(&[(table, ""), ("listeners = [\"192.0.2.1:4420\", ", "listeners = [")])
    );
    let host =
        |host: &str| json!({ "subsystem": DB, "host": format!("nqn.2026-01.org.example:{host}") });
    let text = edited(TEXT, MethodKind::Delete, Host, host("one"));
    let entry = "    # primary\n    \"nqn.2026-01.org.example:one\", # rack 1\n";
    let mask = ("[\"nqn.2026-01.org.example:one\", \"nqn", "[\"nqn");
    assert_eq!(text, replaced(&[(entry, ""), mask]));
    let text = edited(TEXT, MethodKind::Delete, Host, host("two"));
    let entry = "    # standby\n    { nqn = \"nqn.2026-01.org.example:two\", dhchap = [\"two\"] }, # rack 2\n";
    let mask = (", \"nqn.2026-01.org.example:two\"]", "]");
    assert_eq!(text, replaced(&[(entry, ""), mask]));
    // Those behind it keep their identifiers.
    let text = edited(TEXT, MethodKind::Delete, Namespace, json!({ "subsystem": DB, "nsid": 1 }));
    let nsids = TargetConfig::parse(&text).unwrap().subsystems[0]
        .namespaces
        .iter()
        .map(|it| it.nsid)
        .collect::<Vec<_>>();
    assert_eq!(nsids, [2, 3], "{text}");
    assert!(text.contains("# Data.\n") && text.contains("read-only = true # for now\n"), "{text}");
    let text = edited(TEXT, MethodKind::Delete, Namespace, json!({ "subsystem": DB, "nsid": 3 }));
    assert!(!text.contains("nsid") && text.contains("# Data.\n"), "{text}");
    let text = edited(TEXT, MethodKind::Delete, Subsystem, json!({ "nqn": DB }));
    assert!(
        text.starts_with("# Head of the file.\n")
            && !text.contains("# Data")
            && text.ends_with("# The end.\n"),
        "{text}"
    );
}

#[test]
fn changed_key_keeps_the_comment_beside_it() {
    use ConfigObject::{Listener, Namespace, Subsystem};
    let set = json!({ "subsystem": DB, "nsid": 2, "read_only": false });
    let text = edited(TEXT, MethodKind::Set, Namespace, set);
    assert_eq!(text, replaced(&[("read-only = true # for now", "read-only = false # for now")]));
    let set = json!({ "subsystem": DB, "nsid": 3, "unset": ["allowed_hosts"] });
    let text = edited(TEXT, MethodKind::Set, Namespace, set);
    assert!(!text.contains("ram:3m\"\nallowed-hosts"), "{text}");
    let set = json!({ "address": "127.0.0.1:4420", "tls": "allowed" });
    let text = edited(TEXT, MethodKind::Set, Listener, set);
    let last = "address = '127.0.0.1:4420'\n";
    assert_eq!(text, replaced(&[(last, &format!("{last}tls = \"allowed\"\n"))]));
    let set = json!({ "nqn": "nqn.2026-01.org.example:open", "allow_any_host": false });
    let text = edited(TEXT, MethodKind::Set, Subsystem, set);
    assert!(text.contains("example:open\"\nallowed-hosts = []\n"), "{text}");
}

#[test]
fn inline_tables_can_be_edited_too() {
    let text = "listener = [{ address = \"127.0.0.1:1\" }]\n";
    let text = edited(
        text,
        MethodKind::Create,
        ConfigObject::Listener,
        json!({ "address": "127.0.0.1:2" }),
    );
    assert_eq!(TargetConfig::parse(&text).unwrap().listeners.len(), 2, "{text}");
}

#[test]
fn limits_are_set_and_removed_beside_what_is_there() {
    use ConfigObject::{ExportLimits, HostLimits, NamespaceLimits, SubsystemLimits};
    let set = |object, parameters: Value| edited(TEXT, MethodKind::Set, object, parameters);
    let limits = json!({ "subsystem": DB, "iops": 5000, "write_bytes": 4096, "burst_ms": 1500 });
    let text = set(SubsystemLimits, limits);
    let last = "listeners = [\"192.0.2.1:4420\", \"127.0.0.1:4420\"]\n";
    let table = "limits = { iops = 5000, write-bytes = 4096, burst = \"1500ms\" }\n";
    assert_eq!(text, replaced(&[(last, &format!("{last}{table}"))]));
    // The last rate takes the burst with it.
    let none = json!({ "subsystem": DB, "iops": 0, "write_bytes": 0 });
    assert_eq!(edited(&text, MethodKind::Set, SubsystemLimits, none), TEXT);
    let text = set(NamespaceLimits, json!({ "subsystem": DB, "namespace": 2, "read_iops": 7 }));
    let last = "read-only = true # for now\n";
    assert_eq!(text, replaced(&[(last, &format!("{last}limits = {{ read-iops = 7 }}\n"))]));
    let host = |host: &str, iops: u64| json!({ "subsystem": DB, "host": format!("nqn.2026-01.org.example:{host}"), "iops": iops });
    let text = set(HostLimits, host("one", 7));
    let entry = "{ nqn = \"nqn.2026-01.org.example:one\", limits = { iops = 7 } }, # rack 1";
    assert_eq!(text, replaced(&[("\"nqn.2026-01.org.example:one\", # rack 1", entry)]));
    assert_eq!(edited(&text, MethodKind::Set, HostLimits, host("one", 0)), TEXT);
    let text = set(HostLimits, host("two", 7));
    let entry = ("dhchap = [\"two\"] }, #", "dhchap = [\"two\"], limits = { iops = 7 } }, #");
    assert_eq!(text, replaced(&[entry]));
    // A host that is named first has the limits of each host, and the new ones.
    let each = set(HostLimits, json!({ "subsystem": DB, "bytes": 9, "burst_ms": 2000 }));
    assert!(each.contains("host-limits = { bytes = 9, burst = \"2s\" }\n"), "{each}");
    let text = edited(&each, MethodKind::Set, HostLimits, host("one", 7));
    assert!(
        text.contains("limits = { bytes = 9, burst = \"2s\", iops = 7 } }, # rack 1"),
        "{text}"
    );
    // The text of a table stays one.
    let table = "[[export]]\nname = \"a\"\nuri = \"ram:1m\"\nlisten = [\"nbd:/a\"]\n\n[export.limits] # x\niops = 5 # five\n";
    let text = edited(table, MethodKind::Set, ExportLimits, json!({ "iops": 6, "bytes": 7 }));
    assert!(text.ends_with("[export.limits] # x\niops = 6 # five\nbytes = 7\n"), "{text}");
}

#[test]
fn limits_of_a_host_where_any_host_may_connect_forbid_no_other() {
    let open = "nqn.2026-01.org.example:open";
    let set = |text: &str, iops: u64| {
        let host = json!({ "subsystem": open, "host": "nqn.2026-01.org.example:h", "iops": iops });
        edited(text, MethodKind::Set, ConfigObject::HostLimits, host)
    };
    let text = set(TEXT, 5);
    let entry = "allow-any-host = true\nallowed-hosts = [{ nqn = \"nqn.2026-01.org.example:h\", limits = { iops = 5 } }]\n";
    assert_eq!(text, replaced(&[("allow-any-host = true\n", entry)]));
    let config = TargetConfig::parse(&text).unwrap();
    assert_eq!(config.subsystems[1].hosts, crate::target_config::HostsConfig::Any);
    assert_eq!(config.subsystems[1].limits.hosts.len(), 1);
    assert_eq!(set(&text, 0), TEXT);
}

#[test]
fn limits_of_what_does_not_exist_are_refused_with_what_does() {
    let refusal = |object: ConfigObject, parameters: Value| {
        let method = TABLE.methods().find(|it| it.name == object.name()).unwrap();
        let arguments = Arguments::validate(method, parameters.as_object().unwrap()).unwrap();
        let edit = ConfigEdit { kind: MethodKind::Set, object, arguments };
        edit.edit_text(TEXT, &[]).unwrap_err().message
    };
    let text = refusal(ConfigObject::SubsystemLimits, json!({ "iops": 5 }));
    assert!(text.contains("no subsystem is named, expected") && text.contains(DB), "{text}");
    let text = refusal(
        ConfigObject::NamespaceLimits,
        json!({ "subsystem": DB, "namespace": 9, "iops": 5 }),
    );
    assert_eq!(text, "set namespace_limits: no `9`, expected 1, 2 or 3");
    let text = refusal(
        ConfigObject::HostLimits,
        json!({ "subsystem": DB, "host": "nqn.2026-01.org.example:new", "iops": 5 }),
    );
    assert!(text.contains("no `nqn.2026-01.org.example:new`, expected"), "{text}");
    let text = refusal(ConfigObject::ExportLimits, json!({ "name": "x", "iops": 5 }));
    assert!(text.starts_with("set export_limits: no `x`, expected"), "{text}");
}

#[test]
fn hosts_and_demands_of_the_discovery_service_are_edited() {
    let discovery = "nqn.2014-08.org.nvmexpress.discovery";
    let set = json!({ "nqn": discovery, "authentication": "required" });
    let host = json!({
        "subsystem": discovery, "host": "nqn.2026-01.org.example:one", "dhchap": ["k"],
    });
    let text = edited(TEXT, MethodKind::Create, ConfigObject::Host, host);
    let table = "\n[discovery]\nallowed-hosts = [{ nqn = \"nqn.2026-01.org.example:one\", dhchap = [\"k\"] }]\n";
    assert!(text.contains(table), "{text}");
    let demanding = edited(&text, MethodKind::Set, ConfigObject::Subsystem, set);
    assert!(
        demanding.contains("dhchap = [\"k\"] }]\nauthentication = \"required\"\n"),
        "{demanding}"
    );
    assert!(TargetConfig::parse(&demanding).unwrap().discovery.authentication_required);
    let unset = json!({ "nqn": discovery, "unset": ["authentication"] });
    assert_eq!(edited(&demanding, MethodKind::Set, ConfigObject::Subsystem, unset), text);
    let host = json!({ "subsystem": discovery, "host": "nqn.2026-01.org.example:one" });
    let text = edited(&text, MethodKind::Delete, ConfigObject::Host, host);
    assert!(!text.contains("discovery") && text.contains("# The end.\n"), "{text}");
}
