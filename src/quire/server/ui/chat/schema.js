// A check of JSON against the parts of JSON Schema that answers are made to follow.

const TYPES = {
  object: (value) => value !== null && typeof value === "object" && !Array.isArray(value),
  array: Array.isArray,
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  integer: Number.isInteger,
  boolean: (value) => typeof value === "boolean",
  null: (value) => value === null,
};

/** Return the first fault as words for people, or null. */
export function faultOf(value, schema, root = schema, at = "answer", depth = 0) {
  if (schema === true || schema === undefined || depth > 64) return null;
  if (schema === false) return `${at} must not be there`;
  if (schema.$ref?.startsWith("#")) return faultOf(value, target(root, schema.$ref), root, at, depth + 1);
  const types = [schema.type ?? []].flat();
  if (types.length && !types.some((type) => TYPES[type]?.(value))) return `${at} is not of type ${types.join(" or ")}`;
  if (schema.enum && !schema.enum.some((each) => same(each, value))) return `${at} is none of ${JSON.stringify(schema.enum)}`;
  if ("const" in schema && !same(schema.const, value)) return `${at} is not ${JSON.stringify(schema.const)}`;
  return ofText(value, schema, at) ?? ofNumber(value, schema, at) ?? ofObject(value, schema, root, at, depth) ?? ofArray(value, schema, root, at, depth) ?? ofChoices(value, schema, root, at, depth);
}

function target(root, reference) {
  const names = reference.slice(1).split("/").filter(Boolean);
  return names.reduce((found, name) => found?.[name.replaceAll("~1", "/").replaceAll("~0", "~")], root);
}

function same(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

function ofText(value, schema, at) {
  if (typeof value !== "string") return null;
  const length = [...value].length;
  if (length < (schema.minLength ?? 0)) return `${at} has fewer than ${schema.minLength} characters`;
  if (length > (schema.maxLength ?? Infinity)) return `${at} has more than ${schema.maxLength} characters`;
  return null;
}

function ofNumber(value, schema, at) {
  if (typeof value !== "number") return null;
  if (value < (schema.minimum ?? -Infinity)) return `${at} is below ${schema.minimum}`;
  if (value > (schema.maximum ?? Infinity)) return `${at} is above ${schema.maximum}`;
  return null;
}

function ofObject(value, schema, root, at, depth) {
  if (!TYPES.object(value)) return null;
  for (const name of schema.required ?? []) if (!Object.hasOwn(value, name)) return `${at}.${name} is missing`;
  for (const [name, each] of Object.entries(value)) {
    const known = Object.hasOwn(schema.properties ?? {}, name);
    if (!known && schema.additionalProperties === false) return `${at}.${name} is not in the schema`;
    const fault = faultOf(each, known ? schema.properties[name] : schema.additionalProperties, root, `${at}.${name}`, depth + 1);
    if (fault) return fault;
  }
  return null;
}

function ofArray(value, schema, root, at, depth) {
  if (!Array.isArray(value)) return null;
  if (value.length < (schema.minItems ?? 0)) return `${at} has fewer than ${schema.minItems} items`;
  if (value.length > (schema.maxItems ?? Infinity)) return `${at} has more than ${schema.maxItems} items`;
  for (const [i, each] of value.entries()) {
    const fault = faultOf(each, schema.prefixItems?.[i] ?? schema.items, root, `${at}[${i}]`, depth + 1);
    if (fault) return fault;
  }
  return null;
}

function ofChoices(value, schema, root, at, depth) {
  const faults = (list) => list.map((each) => faultOf(value, each, root, at, depth + 1));
  const all = faults(schema.allOf ?? []).find(Boolean);
  if (all) return all;
  for (const [name, list] of Object.entries({ anyOf: schema.anyOf, oneOf: schema.oneOf })) {
    if (!list) continue;
    const fits = faults(list).filter((fault) => !fault).length;
    if (!fits || (name === "oneOf" && fits > 1)) return `${at} fits ${fits} of the choices in ${name}`;
  }
  return null;
}

const DATA = ["const", "enum", "default", "examples"];

/** Return the first type in a schema that JSON has not; null if all are right. */
export function wrongType(schema) {
  if (schema === null || typeof schema !== "object") return null;
  const kinds = [schema.type].flat().filter((each) => typeof each === "string");
  const wrong = Array.isArray(schema) ? undefined : kinds.find((each) => !Object.hasOwn(TYPES, each));
  if (wrong !== undefined) return wrong;
  for (const [name, each] of Object.entries(schema)) {
    const found = DATA.includes(name) ? null : wrongType(each);
    if (found !== null) return found;
  }
  return null;
}
