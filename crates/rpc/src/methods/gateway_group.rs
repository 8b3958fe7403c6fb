//! Gateway group of a target: its members and ANA groups, drain and rebalance.

use serde_json::{Value, json};
use tenmil_group::{GroupPhase, MemberStatus};

use crate::error::RpcError;
use crate::group_session::GroupSession;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

const MEMBER: &[FieldSchema] = &[
    FieldSchema::new("name", ResultType::Text, "name of the gateway"),
    FieldSchema::new("addresses", ResultType::Texts, "addresses at which hosts connect"),
    FieldSchema::new("is_draining", ResultType::Flag, "whether others take over its ANA groups"),
    FieldSchema::new("controller_ids", ResultType::Text, "first and last controller identifier"),
];

const ANA_GROUP: &[FieldSchema] = &[
    FieldSchema::new("ana_group", ResultType::Whole, "ANA group"),
    FieldSchema::new(
        "owner",
        ResultType::Maybe(&ResultType::Text),
        "gateway that owns it; null if none does",
    ),
    FieldSchema::new("term", ResultType::Whole, "number of its ownerships so far"),
    FieldSchema::new("is_open", ResultType::Flag, "whether its owner has the devices open"),
    FieldSchema::new("phase", ResultType::Text, "what this gateway does with it"),
];

const GROUP: &[FieldSchema] = &[
    FieldSchema::new("member", ResultType::Text, "name of this gateway"),
    FieldSchema::new("state", ResultType::Text, "state of its membership"),
    FieldSchema::new(
        "store_trouble",
        ResultType::Maybe(&ResultType::Text),
        "why the store did not reply; null if it did",
    ),
    FieldSchema::new("members", ResultType::Rows(MEMBER), "gateways that hold a lease"),
    FieldSchema::new("ana_groups", ResultType::Rows(ANA_GROUP), "ANA groups"),
];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "group",
        parameters: &[],
        answer: ResultType::Record(GROUP),
        help: "Show the gateway group of a target: its members, and the owner of each ANA group",
        example: "tenmil get group",
        run: |call| Ok(group_record(&session(call)?.status())),
    },
    Method {
        verb: MethodKind::Set,
        name: "group",
        parameters: &[Parameter {
            name: "draining",
            kind: ParamType::Flag,
            need: ParamDefault::Required,
            help: "whether the other gateways take over the ANA groups of this one",
        }],
        answer: ResultType::Record(GROUP),
        help: "Drain this gateway, or give it its share of the ANA groups again",
        example: "tenmil set group draining=true",
        run: set_group,
    },
];

fn session<'a>(call: &CallContext<'a>) -> Result<&'a GroupSession, RpcError> {
    call.state.find_part::<GroupSession>("gateway group")
}

fn set_group(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let session = session(call)?;
    session.set_draining(call.arguments.boolean("draining").unwrap_or_default());
    Ok(group_record(&session.status()))
}

fn group_record(status: &MemberStatus) -> Value {
    let members = status.members.iter().map(|(name, member)| {
        let (first, count) = tenmil_group::records::controller_ids_of_slot(member.slot);
        json!({
            "name": name,
            "addresses": member.addresses,
            "is_draining": member.is_draining,
            "controller_ids": format!("{first}-{}", first + count - 1),
        })
    });
    let groups = status.groups.iter().map(|(group, (record, is_owned))| {
        let owner = record.owner.as_ref().filter(|_| *is_owned);
        json!({
            "ana_group": group,
            "owner": owner.map(|owner| &owner.name),
            "term": record.term,
            "is_open": record.is_open && *is_owned,
            "phase": phase_name(status.phases.get(group)),
        })
    });
    json!({
        "member": status.name,
        "state": status.state.name(),
        "store_trouble": status.store_trouble,
        "members": members.collect::<Vec<_>>(),
        "ana_groups": groups.collect::<Vec<_>>(),
    })
}

const fn phase_name(phase: Option<&GroupPhase>) -> &'static str {
    match phase {
        None | Some(GroupPhase::Idle) => "idle",
        Some(GroupPhase::Fencing) => "fencing",
        Some(GroupPhase::Opening | GroupPhase::Opened(_)) => "opening",
        Some(GroupPhase::Active) => "active",
        Some(GroupPhase::Closing | GroupPhase::Closed) => "closing",
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;
    use tenmil_group::{LeaseTiming, Member, MemberConfig, MemoryStore, OpenedGroup, StoreReply};

    use super::{METHODS, group_record};

    /// Joins and opens its group, so that each field has a value.
    #[test]
    fn record_of_a_member_has_the_declared_type() {
        let config = MemberConfig {
            name: "a".into(),
            addresses: vec!["192.0.2.1:4420".into()],
            groups: [7].into(),
            configuration: String::new(),
            timing: LeaseTiming::default(),
            injected_bug: None,
        };
        let (mut member, mut store) = (Member::new(config, 1), MemoryStore::default());
        let now = Instant { ns: 1 };
        let check =
            |member: &Member| METHODS[0].answer.check_value(&group_record(&member.status()));
        assert_eq!(check(&member), Ok(()));
        for _ in 0..20 {
            member.step(now);
            while let Some((id, operation)) =
                member.next_lease_operation().or_else(|| member.next_map_operation())
            {
                let reply = store.execute_at(now, &operation);
                assert!(!matches!(reply, StoreReply::Unknown(_)));
                member.handle_reply(now, id, reply);
            }
            while member.next_action().is_some() {
                member.handle_opened(now, 7, Some(OpenedGroup::default()));
            }
        }
        assert_eq!(check(&member), Ok(()));
        let record = group_record(&member.status());
        assert_eq!(record["state"], "member");
        assert_eq!(record["ana_groups"][0]["owner"], "a");
        assert_eq!(record["ana_groups"][0]["phase"], "active");
        assert_eq!(record["members"][0]["controller_ids"], "1-2048");
    }
}
